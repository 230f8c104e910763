"""Style sheet of the report, for light and dark screens and for paper."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root {
  color-scheme: light dark;
  --back: #ffffff; --card: #f6f7f9; --text: #1b1f24; --dim: #59636e; --line: #d6dbe1;
  --ok: #197833; --warn: #9a5b00; --fail: #c4171f; --skip: #59636e; --link: #0b5fc0;
  --ok-back: #e3f5e8; --warn-back: #fdf0d5; --fail-back: #fde7e7; --skip-back: #eceff2;
  --jit: #0b5fc0; --jit-back: #e2eefb;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #14171b; --card: #1c2026; --text: #e4e8ec; --dim: #9aa5b1; --line: #343b44;
    --ok: #5dcb7c; --warn: #e8b04b; --fail: #ff8078; --skip: #9aa5b1; --link: #79b8ff;
    --ok-back: #15321f; --warn-back: #3a2c10; --fail-back: #431c1d; --skip-back: #282e36;
    --jit: #79b8ff; --jit-back: #172d47;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 70rem;
  background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  overflow-wrap: break-word;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.1rem 0 0.4rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 0.7rem; }
h3 { font-size: 1rem; margin: 0 0 0.3rem; }
p { margin: 0.3rem 0; }
a { color: var(--link); }
code, pre, .mono {
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: 0.87em;
}
.whole { white-space: nowrap; }
code {
  background: var(--skip-back); border-radius: 3px; padding: 0.1em 0.3em;
  overflow-wrap: anywhere; box-decoration-break: clone; -webkit-box-decoration-break: clone;
}
.verdict {
  border-left: 6px solid var(--mark); background: var(--mark-back);
  padding: 0.9rem 1.2rem; border-radius: 4px;
}
.verdict h1 { color: var(--mark); }
.verdict .chip { background: var(--back); }
.lines code { background: none; padding: 0; color: var(--text); font-size: 1em; }
.program, .facts { color: var(--dim); }
.ok { --mark: var(--ok); --mark-back: var(--ok-back); }
.warn { --mark: var(--warn); --mark-back: var(--warn-back); }
.fail { --mark: var(--fail); --mark-back: var(--fail-back); }
.skip { --mark: var(--skip); --mark-back: var(--skip-back); }
.jit { --mark: var(--jit); --mark-back: var(--jit-back); }
.chip {
  display: inline-block; padding: 0 0.5em; border-radius: 3px; font-size: 0.82em; font-weight: 600;
  background: var(--mark-back); color: var(--mark); white-space: nowrap;
}
.steps { padding-left: 1.4rem; }
.steps li { margin: 0.5rem 0; overflow-wrap: anywhere; }
.checks { list-style: none; margin: 0; padding: 0; }
.check {
  display: grid; grid-template-columns: 3.4rem 7.5rem minmax(0, 1fr); gap: 0 0.8rem;
  padding: 0.55rem 0.2rem; border-top: 1px solid var(--line); break-inside: avoid-page;
}
.check:last-child { border-bottom: 1px solid var(--line); }
.check h3 { margin: 0; font-size: 1em; }
.check .what { overflow-wrap: anywhere; }
.check details { margin-top: 0.2rem; }
.check summary { color: var(--dim); }
.lines {
  margin: 0.35rem 0 0.1rem; padding: 0.45rem 0.7rem; background: var(--card); border-radius: 4px;
  white-space: pre-wrap; color: var(--dim);
}
.fix b { color: var(--dim); }
.groups { columns: 27rem; column-gap: 2.5rem; margin-bottom: 1.2rem; }
.groups > div { break-inside: avoid; }
.named { margin: 0 0 1.2rem; font-size: 0.93em; }
.named div {
  display: grid; grid-template-columns: 9rem minmax(0, 1fr); gap: 0 0.8rem;
  padding: 0.25rem 0.3rem; border-top: 1px solid var(--line); break-inside: avoid-page;
}
.named dt { color: var(--dim); }
.named dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin-bottom: 1.2rem; }
.scroll:focus-visible { outline: 2px solid var(--link); }
table { border-collapse: collapse; font-size: 0.93em; }
th, td {
  text-align: left; vertical-align: top; padding: 0.4rem 0.9rem 0.4rem 0.3rem;
  border-top: 1px solid var(--line);
}
thead th { border-top: 0; border-bottom: 2px solid var(--line); }
th small, td small { display: block; font-weight: 400; color: var(--dim); }
tbody th { font-weight: 600; }
.roles { min-width: 9rem; }
.long { display: inline-block; min-width: 9rem; }
.library { overflow-wrap: anywhere; min-width: 16rem; }
.scroll + .legend { margin-top: -0.6rem; }
.legend { color: var(--dim); font-size: 0.9em; }
.legend .chip { margin-right: 0.25rem; }
.legend span.entry { margin-right: 1.1rem; display: inline-block; }
.meaning {
  background: var(--card); border-radius: 4px; padding: 0.8rem 1rem; margin: 0.7rem 0;
  break-inside: avoid-page;
}
.meaning:target { outline: 2px solid var(--link); }
.meaning h3 .mono { color: var(--dim); font-weight: 400; margin-left: 0.4rem; }
summary { cursor: pointer; }
pre {
  background: var(--card); padding: 0.8rem; border-radius: 4px; white-space: pre-wrap;
  overflow-wrap: anywhere;
}
footer { margin-top: 2.5rem; color: var(--dim); font-size: 0.9em; }
@media (max-width: 40rem) {
  .check { grid-template-columns: 3.4rem minmax(0, 1fr); }
  .check .what { grid-column: 1 / -1; }
  .named div { grid-template-columns: 1fr; }
  th, td { padding-right: 0.4rem; }
  .roles, .long { min-width: 0; }
  .whole:has(.chip) { white-space: normal; }
}
@media print {
  :root {
    --back: #ffffff; --card: #f6f7f9; --text: #000000; --dim: #444444; --line: #bbbbbb;
    --ok: #197833; --warn: #9a5b00; --fail: #c4171f; --skip: #444444; --link: #000000;
    --ok-back: #e3f5e8; --warn-back: #fdf0d5; --fail-back: #fde7e7; --skip-back: #eceff2;
    --jit: #0b5fc0; --jit-back: #e2eefb; color-scheme: light;
  }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { padding: 0; max-width: none; font-size: 10pt; }
  .json { display: none; }
  .scroll { overflow: visible; }
  .long { min-width: 0; overflow-wrap: anywhere; }
  details::details-content { content-visibility: visible; block-size: auto; }
  h2, h3 { break-after: avoid-page; }
}
"""
