/* Show the sections that match `?q=...`, best first. SECTIONS and MiniSearch are loaded before. */
"use strict";

const SHOWN = 40; // results
const EXCERPT = 240; // characters
// Pages that repeat others or that few readers look for, and their weight.
const LESS = /^(CHANGELOG|CONTRIBUTING|docs\/releasing|findings\.html|cli|schemas)/;
const WEIGHT = 0.4;

/* Sections hold words and phrases; a section that holds the query as a phrase comes first. */
function find(query) {
  const index = new MiniSearch({ fields: ["title", "page", "text"] });
  index.addAll(SECTIONS.map(([, page, title, text], id) => ({ id, page, title, text })));
  const phrase = query.toLowerCase();
  const weigh = (id) => {
    const [address, , title, text] = SECTIONS[id];
    const stands = (words) => words.toLowerCase().includes(phrase);
    return (stands(title) ? 4 : stands(text) ? 3 : 1) * (LESS.test(address) ? WEIGHT : 1);
  };
  const options = { boost: { title: 2 }, prefix: (term) => term.length > 2, boostDocument: weigh };
  const exact = index.search(query, { ...options, combineWith: "AND" });
  const similar = { ...options, fuzzy: (term) => (term.length > 4 ? 0.2 : 0) };
  return exact.length ? exact : index.search(query, similar);
}

/* Return the part of a text around the first of the terms, with every term marked. */
function excerpt(text, query, terms) {
  const escaped = [query, ...terms].map((term) => term.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&"));
  const pattern = new RegExp(`(?<![\\p{L}\\p{N}])(${escaped.join("|")})`, "giu");
  const whole = text.toLowerCase().indexOf(query.toLowerCase());
  const first = Math.max(whole >= 0 ? whole : text.search(pattern), 0);
  const start = first < EXCERPT / 2 ? 0 : text.indexOf(" ", first - EXCERPT / 2) + 1;
  const space = text.indexOf(" ", start + EXCERPT);
  const end = space < 0 ? text.length : space;
  const context = make("p", "context");
  context.append(start ? "… " : "");
  text.slice(start, end).split(pattern).forEach((piece, place) =>
    context.append(place % 2 ? make("mark", "", piece) : piece),
  );
  context.append(end < text.length ? " …" : "");
  return context;
}

function make(tag, name, text = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.textContent = text;
  return element;
}

function show(query) {
  const found = query ? find(query) : [];
  const results = document.getElementById("search-results");
  const count = `${found.length || "No"} section${found.length === 1 ? "" : "s"}`;
  results.append(make("h1", "", "Search"));
  results.append(make("p", "", query ? `${count} match “${query}”.` : "Type what you look for."));
  const list = make("ul", "search");
  for (const { id, terms } of found.slice(0, SHOWN)) {
    const [address, page, title, text] = SECTIONS[id];
    const item = make("li");
    const link = make("a", "", title === page ? page : `${page} › ${title}`);
    link.href = address;
    item.append(link, excerpt(text, query, terms));
    list.append(item);
  }
  results.append(list);
}

const query = (new URLSearchParams(location.search).get("q") ?? "").trim();
document.querySelector("input[name=q]").value = query;
show(query);
