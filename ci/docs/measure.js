/* Return a sentence for each thing on the page that is cut or wider than its column. */
() => {
  const BLOCKS = "table, pre, td, th, code, img, p, li";
  const root = document.documentElement;
  const found = [];
  if (root.scrollWidth > root.clientWidth)
    found.push(`the page is ${root.scrollWidth} px wide`);
  const article = document.querySelector("article") ?? document.body;
  const scrolls = (element) => /auto|scroll/.test(getComputedStyle(element).overflowX);
  const scroller = (element) => {
    for (let one = element.parentElement; one && one !== article; one = one.parentElement)
      if (scrolls(one)) return one;
    return null;
  };
  const tell = (element, problem) => {
    const words = element.textContent.trim().replace(/\s+/g, " ").slice(0, 60);
    found.push(`${element.localName} ${problem}: ${words}`);
  };
  const edge = article.getBoundingClientRect().right + 1;
  for (const element of article.querySelectorAll(BLOCKS)) {
    if (element.getClientRects().length === 0) continue; // not shown
    if (element.scrollWidth > element.clientWidth + 1 && element.clientWidth && !scrolls(element))
      tell(element, `is cut at ${element.clientWidth} of ${element.scrollWidth} px`);
    if (!scroller(element) && element.getBoundingClientRect().right > edge)
      tell(element, "leaves its column");
    const cell = element.localName === "code" && element.closest("td, th");
    if (cell && element.getBoundingClientRect().right > cell.getBoundingClientRect().right + 1)
      tell(element, "leaves its cell");
  }
  for (const wrapper of article.querySelectorAll(".table-wrapper"))
    if (wrapper.scrollWidth > wrapper.clientWidth + 1)
      tell(wrapper, `has to scroll: ${wrapper.clientWidth} of ${wrapper.scrollWidth} px`);
  return found;
};
