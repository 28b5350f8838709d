const all = [...document.querySelectorAll("section")], main = document.querySelector("main");
const find = document.querySelector("#find"), order = document.querySelector("#order");
const shown = document.querySelector("#shown"), count = document.querySelector("#count");
const texts = all.map(one => one.textContent.toLowerCase());
function search() {
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  all.forEach((one, i) => one.hidden = !words.every(word => texts[i].includes(word)));
  count.textContent = words.length ? all.filter(one => !one.hidden).length + " of " + all.length : "";
}
function sort() {
  const sign = Number(order.value), of = one => Number(one.dataset.reward || -1e9);
  main.append(...(sign ? [...all].sort((a, b) => sign * (of(a) - of(b))) : all));
}
function open() { document.querySelectorAll("details").forEach(one => one.open = shown.checked); }
function go(by) {
  const seen = [...main.children].filter(one => !one.hidden), tops = seen.map(one => one.getBoundingClientRect().top);
  const below = document.querySelector("form").getBoundingClientRect().height + 16;
  const next = by > 0 ? tops.findIndex(top => top > below + 2) : tops.findLastIndex(top => top < below - 2);
  if (next >= 0) { scrollBy(0, tops[next] - below); seen[next].focus({preventScroll: true}); }
}
find.oninput = search; order.onchange = sort; shown.onchange = open;
document.querySelector("form").onsubmit = event => event.preventDefault();
document.onkeydown = event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select")) { if (event.key === "Escape") event.target.blur(); return; }
  if (event.key === "/") { event.preventDefault(); find.focus(); }
  if (event.key === "j") go(1);
  if (event.key === "k") go(-1);
  if (event.key === "o") { shown.checked = !shown.checked; open(); }
};
