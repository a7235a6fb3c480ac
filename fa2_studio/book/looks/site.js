// What the pages do by themselves: live pieces get their height and theme, questions become cards.
"use strict";

// Live pieces ---------------------------------------------------------------------------------------------------------

const frames = () => [...document.querySelectorAll("figure.live-piece iframe")];
const tellTheme = () => {
  for (const frame of frames()) frame.contentWindow?.postMessage({ theme: document.documentElement.dataset.theme }, "*");
};

addEventListener("message", (event) => {
  const height = event.data?.live;
  const frame = frames().find((e) => e.contentWindow === event.source);
  if (!frame || !Number.isFinite(height)) return;
  frame.style.height = `${Math.min(height, 4000)}px`;
  frame.contentWindow.postMessage({ theme: document.documentElement.dataset.theme }, "*");
});

/** A frame is as high as its page, so it must be told how much of it is above the window or below the header. */
const tellPast = () => {
  const header = document.querySelector(".bd-header-article")?.getBoundingClientRect().bottom ?? 0;
  for (const frame of frames()) {
    const { top, bottom } = frame.getBoundingClientRect();
    if (top < innerHeight && bottom > 0) frame.contentWindow?.postMessage({ past: Math.max(0, header) - top }, "*");
  }
};
addEventListener("scroll", tellPast, { passive: true });

/** A wide piece breaks out of the column of text, over the bars at both sides. */
const widen = () => {
  const room = document.documentElement.clientWidth;
  const width = Math.min(room - 32, 1480);
  for (const figure of document.querySelectorAll("figure.live-piece.wide")) {
    figure.style = "";
    const { left, width: narrow } = figure.getBoundingClientRect();
    if (room >= 1000 && width > narrow) figure.style = `width: ${width}px; margin-left: ${(room - width) / 2 - left}px`;
  }
};
addEventListener("resize", widen);
addEventListener("load", () => new ResizeObserver(() => requestAnimationFrame(widen)).observe(document.querySelector("article") ?? document.body)); // a bar opens

/** While a wide piece is in view, the bars that it covers are empty, so that it cuts none of their lines. */
addEventListener("load", () => {
  const seen = new Set();
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) seen[isIntersecting ? "add" : "delete"](target);
    document.body.classList.toggle("covered", seen.size > 0);
  });
  for (const figure of document.querySelectorAll("figure.live-piece.wide")) watch.observe(figure);
});
new MutationObserver(tellTheme).observe(document.documentElement, { attributeFilter: ["data-theme"] });

/** The list of a long page's sections scrolls along, so that the section that is read stays in view. */
addEventListener("DOMContentLoaded", () => {
  const bar = document.querySelector(".bd-sidebar-secondary");
  if (!bar) return;
  new MutationObserver(() => {
    const now = [...bar.querySelectorAll("a.active")].at(-1);
    if (now) bar.scrollTop += now.getBoundingClientRect().top - bar.getBoundingClientRect().top - bar.clientHeight / 2;
  }).observe(bar, { attributeFilter: ["class"], subtree: true });
});

// Listings: a tag such as # FA2.A1.L9 goes to the margin, a comment that says "moved" or "new" stands out -----------------

const markListings = () => {
  for (const comment of document.querySelectorAll(".highlight .c1")) {
    const [, before, tag] = /^(# .*?)((?:FA\d\.[A-Z]\S+ ?)+)$/.exec(comment.textContent) ?? [];
    if (tag) {
      const margin = element("span", "tag", tag.trim());
      comment.replaceChildren(margin, before.replace(/^#\s*$/, "").trimEnd());
      const below = margin.getBoundingClientRect().top - comment.getBoundingClientRect().top > 8; // its line is too long
      margin.classList.toggle("inline", below);
    }
    if (/^# (new|moved|changed)\b/.test(comment.textContent)) comment.classList.add("changed");
  }
};
addEventListener("DOMContentLoaded", markListings);

// Cards ---------------------------------------------------------------------------------------------------------------

const WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split(" ");
const plain = (text) => text.trim().replace(/[.,:?]+$/, "").toLowerCase();

/** A number, written in digits or as a word, or null. */
function numberIn(text) {
  const digits = /^(?:about |nearly )?(-?[\d,]+(?:\.\d+)?)\s*%?$/.exec(plain(text));
  if (digits) return Number(digits[1].replaceAll(",", ""));
  const word = WORDS.indexOf(plain(text));
  return word < 0 ? null : word;
}

/** What a question can be answered with: its choices, a number, or (null) nothing but a look. */
function kindOf(choices, answer) {
  const right = answer.split("; ").map(plain);
  if (choices.length) return { choices, right: choices.filter((choice) => right.includes(plain(choice))) };
  const number = numberIn(answer);
  if (number !== null) return { number, within: /^(about|nearly)/.test(plain(answer)) ? 0.1 * number : 0 };
  return null;
}

/** What follows a question: its choices, if it lists some, and the answer's fold; null if there is no fold. */
function partsOf(question) {
  let list = null;
  for (let e = question.nextElementSibling; e; e = e.nextElementSibling) {
    if (e.matches("details") && e.querySelector("summary")?.textContent === "Answer") return { list, fold: e };
    if (!e.matches("ul, p, math, table, div.highlight-python, div.math-wrapper")) return null;
    if (e.textContent.trim().startsWith("☐")) list = e;
  }
  return null;
}

function element(tag, className, ...inside) {
  const e = document.createElement(tag);
  e.className = className;
  e.append(...inside);
  return e;
}

/** Radio buttons, check boxes where several choices are right, or a field for a number. */
function fieldFor(kind, name) {
  if (kind.choices) {
    const type = kind.right.length > 1 ? "checkbox" : "radio";
    const labels = kind.choices.map((choice) => {
      const box = Object.assign(document.createElement("input"), { type, name, value: choice });
      return element("label", "", box, ` ${choice}`);
    });
    return element("span", "choices", ...labels);
  }
  const input = Object.assign(document.createElement("input"), { name, inputMode: "decimal", autocomplete: "off" });
  input.setAttribute("aria-label", "Your answer, a number");
  return input;
}

function isRight(kind, given) {
  if (kind.choices) return given.length === kind.right.length && given.every((choice) => kind.right.includes(choice));
  const number = numberIn(given[0]);
  return number !== null && Math.abs(number - kind.number) <= Math.abs(kind.within);
}

/** One card: the question, a field, Check, and behind it the answer with its code inside. */
function makeCard(question, n) {
  const parts = partsOf(question);
  if (!parts) return;
  const { list, fold } = parts;
  while (question.nextElementSibling !== fold) question.append(question.nextElementSibling);
  const answer = element("div", "answer");
  answer.hidden = true;
  answer.append(...[...fold.childNodes].filter((e) => e.nodeName !== "SUMMARY"));
  fold.remove();
  list?.remove();
  const choices = [...(list?.children ?? [])].map((item) => item.textContent.replace("☐", "").trim());
  const kind = kindOf(choices, answer.querySelector("strong")?.textContent ?? "");
  const picture = question.nextElementSibling; // right below the question, it shows the answer
  picture?.classList.toggle("awaits", picture.matches(".cell:has(img):not(:has(iframe))")); // not a live piece, in which the answer is to be found
  const button = element("button", "", kind ? "Check" : "Show the answer");
  const verdict = element("output", "verdict");
  const form = element("form", "ask", ...(kind ? [fieldFor(kind, `card${n}`)] : []), button, verdict);
  form.onsubmit = (event) => {
    event.preventDefault();
    const given = kind ? new FormData(form).getAll(`card${n}`).filter((value) => value.trim()) : [];
    if (kind && !given.length) {
      verdict.textContent = "First a guess: there is nothing to lose.";
      return;
    }
    if (kind) verdict.textContent = isRight(kind, given) ? "Right." : "Not quite.";
    answer.hidden = false;
    picture?.classList.remove("awaits");
    button.hidden = !kind;
  };
  question.append(form, answer);
  question.classList.add("asks");
}

addEventListener("DOMContentLoaded", () => document.querySelectorAll("div.admonition.predict").forEach(makeCard));
