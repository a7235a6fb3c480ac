// Arrows, space and the page keys turn; n shows the notes; the address keeps the place. What is too large is scaled to fit.
// A phone shows all slides on one page.
"use strict";
const all = [...document.querySelectorAll("section")];
let at = Math.min(Math.max(Number(location.hash.slice(1)) - 1, 0), all.length - 1) || 0;
for (const [n, section] of all.entries()) {
  section.dataset.part = [document.title, section.dataset.part].filter(Boolean).join(" · ");
  section.dataset.number = `${n + 1} / ${all.length}`;
}

/** Letters have the largest of three sizes that fits. A question has the size of its answer, so that nothing moves. Lines of
 * code are never broken, so their letters fit the longest. */
function fit(section) {
  if (phone.matches) return onPage();
  const next = all[all.indexOf(section) + 1];
  if (section.matches(".asks") && next?.querySelector(".again")) {
    next.classList.add("now");
    fit(next);
    next.classList.remove("now");
    return sized(section, next.style.fontSize);
  }
  const has = (some) => section.querySelector(some);
  const most = has(".parts") ? 84 : has("h1, .over, li:nth-child(4):not(.choice)") ? 100 : 132; // a table of several slides has one size
  for (const size of [132, 100, 84, 72].filter((step) => step <= most)) { // the smallest is for what never fits
    sized(section, `${size}%`);
    if (!tall(section) && !wide(section)) break;
  }
  const frame = section.querySelector("iframe");
  if (!frame) return;
  const { clientWidth, clientHeight } = frame.parentElement;
  const scale = Math.min(clientWidth / frame.width, clientHeight / frame.height);
  const left = (clientWidth - frame.width * scale) / 2;
  frame.style = `transform: translate(${left}px) scale(${scale})`;
}
function sized(section, size) {
  section.style.fontSize = size;
  const code = [...section.querySelectorAll("pre")];
  for (const pre of code) pre.style.fontSize = "1em";
  const rooms = code.map((pre) => Math.min(1, (0.99 * pre.clientWidth) / pre.scrollWidth));
  const room = Math.min(1, ...rooms.filter((_, n) => code[n].className !== "printed"));
  for (const [n, pre] of code.entries()) pre.style.fontSize = `${Math.min(room, rooms[n])}em`; // a wide table's alone are smaller
}
const phone = matchMedia("(max-width: 600px)");
function onPage() {
  for (const element of document.querySelectorAll("section, pre")) element.style.fontSize = "";
  for (const frame of document.querySelectorAll("iframe")) frame.style = "";
}
const tall = (section) => {
  const columns = [...section.querySelectorAll(".two > div")];
  return section.scrollHeight > innerHeight || columns.some((e) => e.scrollHeight > e.clientHeight + 1);
};
const wide = (section) => [...section.querySelectorAll("div")].some((e) => e.scrollWidth > e.clientWidth);

function go(to) {
  all[at].classList.remove("now");
  at = Math.min(Math.max(to, 0), all.length - 1);
  all[at].classList.add("now");
  history.replaceState(null, "", `#${at + 1}`);
  fit(all[at]);
}

const KEYS = { ArrowRight: 1, PageDown: 1, " ": 1, ArrowLeft: -1, PageUp: -1, Home: -Infinity, End: Infinity };
addEventListener("keydown", (event) => {
  if (event.key in KEYS) go(at + KEYS[event.key]);
  if (event.key !== "n") return;
  document.body.classList.toggle("notes");
  fit(all[at]);
});
addEventListener("message", ({ data, source }) => {
  if (data.turn) go(at + data.turn);
  const frame = [...document.querySelectorAll("iframe")].find((e) => e.contentWindow === source);
  if (!frame || !data.live) return;
  frame.height = data.live;
  fit(all[at]);
});
addEventListener("resize", () => fit(all[at]));
addEventListener("hashchange", () => go(Number(location.hash.slice(1)) - 1));
go(at);
