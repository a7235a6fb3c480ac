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
new MutationObserver(tellTheme).observe(document.documentElement, { attributeFilter: ["data-theme"] });

// Cards ---------------------------------------------------------------------------------------------------------------

const WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split(" ");
const plain = (text) => text.trim().replace(/[.,:?]+$/, "").toLowerCase();
const bare = (text) => plain(text).replace(/^(about|nearly) /, "");

/** A number, written in digits or as a word, or null. */
function numberIn(text) {
  const digits = /^(?:about |nearly )?(-?[\d,]+(?:\.\d+)?)\s*%?$/.exec(plain(text));
  if (digits) return Number(digits[1].replaceAll(",", ""));
  const word = WORDS.indexOf(plain(text));
  return word < 0 ? null : word;
}

/** What a question can be answered with: its own choices, yes or no, a number, or nothing but a look. */
function kindOf(question, answer) {
  const offered = /(?::|,)\s([^:?.]+ or [^:?.]+)\?\s*$/.exec(question);
  if (offered) {
    const choices = offered[1].split(/,? or |, /).map((choice) => choice.trim()).filter(Boolean);
    const right = choices.filter((choice) => bare(answer).startsWith(bare(choice)));
    if (choices.length > 1 && right.length === 1) return { choices, right: right[0] };
  }
  const yesOrNo = /^(yes|no)\b/.exec(plain(answer));
  if (yesOrNo && !/\b(and|or) (yes|no)\b/.test(plain(answer)))
    return { choices: ["yes", "no"], right: yesOrNo[1] };
  const number = numberIn(answer);
  if (number !== null) return { number, within: /^(about|nearly)/.test(plain(answer)) ? 0.1 * number : 0 };
  return null;
}

/** Question, code cells and the answer's fold that follow each other; null if there is no fold. */
function partsOf(question) {
  const cells = [];
  for (let e = question.nextElementSibling; e && cells.length < 3; e = e.nextElementSibling) {
    if (e.matches("details") && e.querySelector("summary")?.textContent === "Answer") return { cells, fold: e };
    if (!e.matches("div.cell")) return null;
    cells.push(e);
  }
  return null;
}

function element(tag, className, ...inside) {
  const e = document.createElement(tag);
  e.className = className;
  e.append(...inside);
  return e;
}

/** Radio buttons or a field for a number. */
function fieldFor(kind, name) {
  if (kind.choices) {
    const labels = kind.choices.map((choice) => {
      const radio = Object.assign(document.createElement("input"), { type: "radio", name, value: choice });
      return element("label", "", radio, ` ${choice}`);
    });
    return element("span", "choices", ...labels);
  }
  const input = Object.assign(document.createElement("input"), { name, inputMode: "decimal", autocomplete: "off" });
  input.setAttribute("aria-label", "Your answer, a number");
  return input;
}

function isRight(kind, said) {
  if (kind.choices) return said === kind.right;
  const number = numberIn(said);
  return number !== null && Math.abs(number - kind.number) <= Math.abs(kind.within);
}

/** One card: the question, a field, Check, and behind it the answer with its code inside. */
function makeCard(question, n) {
  const parts = partsOf(question);
  if (!parts) return;
  const { cells, fold } = parts;
  const answer = element("div", "answer");
  answer.hidden = true;
  answer.append(...[...fold.childNodes].filter((e) => e.nodeName !== "SUMMARY"), ...cells);
  fold.remove();
  const words = [...question.children].filter((e) => !e.matches(".admonition-title")).map((e) => e.textContent);
  const bold = answer.querySelector("strong");
  const kind = kindOf(words.join(" ").replace(/\s+/g, " ").trim(), bold?.textContent ?? "");
  const button = element("button", "", kind ? "Check" : "Show the answer");
  const verdict = element("output", "verdict");
  const form = element("form", "ask", ...(kind ? [fieldFor(kind, `card${n}`)] : []), button, verdict);
  form.onsubmit = (event) => {
    event.preventDefault();
    const said = kind && new FormData(form).get(`card${n}`);
    if (kind && !said?.trim()) {
      verdict.textContent = "First a guess: there is nothing to lose.";
      return;
    }
    if (kind) verdict.textContent = isRight(kind, said) ? "Right." : "Not quite.";
    answer.hidden = false;
    button.hidden = !kind;
  };
  question.append(form, answer);
  question.classList.add("asks");
}

addEventListener("DOMContentLoaded", () => document.querySelectorAll("div.admonition.predict").forEach(makeCard));
