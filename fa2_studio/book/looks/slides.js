// Arrows, space and a click on the sides turn; n shows the notes; the address keeps the place.
"use strict";
const all = [...document.querySelectorAll("section")];
let at = Math.min(Math.max(Number(location.hash.slice(1)) - 1, 0), all.length - 1) || 0;

function go(to) {
  all[at].classList.remove("now");
  at = Math.min(Math.max(to, 0), all.length - 1);
  all[at].classList.add("now");
  history.replaceState(null, "", `#${at + 1}`);
}

const KEYS = { ArrowRight: 1, PageDown: 1, " ": 1, ArrowLeft: -1, PageUp: -1, Home: -Infinity, End: Infinity };
addEventListener("keydown", (event) => {
  if (event.key in KEYS) go(at + KEYS[event.key]);
  if (event.key === "n") document.body.classList.toggle("notes");
});
addEventListener("hashchange", () => go(Number(location.hash.slice(1)) - 1));
go(at);
