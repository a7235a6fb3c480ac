/* One row of softmax in blocks: scores above, weights below, and the state beside them. */
"use strict";

const SCORES = [0.8, -0.5, 1.6, 0.2, 2.9, 0.4, -1.2, 1.9];
const VALUES = [0.6, -0.4, 0.9, -0.8, 0.3, 0.7, -0.6, 0.5];
const [LOW, HIGH] = [-3, 5]; // the scores that can be dragged to
const N = SCORES.length;
const set = { order: ask.get("order") || "forward", B: Number(ask.get("b") || 2) };
const stage = $("stage");
const form = $("settings");
let scores = [...SCORES];
let hidden = SCORES.map(() => false);
let run = [];
let place = {}; // sizes in pixels
const deck = ask.has("deck");
let sums = [0, 1]; // the ends of the one scale of ℓ and o

form.innerHTML = [
  choice("order of the blocks", "order", [["forward"], ["backward"], ["outside in"]]),
  choice("keys in a block", "B", [["1"], ["2"], ["4"], ["8"]]),
  `<fieldset><legend>scores</legend><button type="button" id="undo">as at first</button></fieldset>`,
].join("");
const transport = new Transport($("transport"), { draw, dwell: (t) => (run[t].rises ? 1800 : 1000) });

// What can be touched stays, also while it is dragged; all other marks are drawn anew.
const marks = shape(stage, "g");
const handles = upTo(N).map((c) => {
  const range = { "aria-valuemin": LOW, "aria-valuemax": HIGH, "aria-label": `score of key ${c + 1}` };
  const handle = shape(stage, "circle", { r: 9, tabindex: 0, role: "slider", ...range });
  handle.addEventListener("pointerdown", (event) => drag(event, c));
  handle.addEventListener("keydown", (event) => press(event, c));
  handle.addEventListener("touchstart", (event) => event.preventDefault(), { passive: false }); // a drag, no scrolling
  const button = {
    class: "number",
    tabindex: 0,
    role: "button",
    "aria-label": `hide key ${c + 1}`,
    "data-key": `n${c}`,
  };
  const number = shape(stage, "g", button);
  shape(number, "rect", { x: -14, y: 5, width: 28, height: 22, rx: 6 });
  shape(number, "text", { y: 20, class: "small middle" }, " ");
  number.addEventListener("click", () => hide(c));
  number.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    hide(c);
  });
  return [handle, number];
});

function hide(c) {
  hidden[c] = !hidden[c];
  prepare();
  transport.show();
}

function prepare() {
  const row = scores.map((s, c) => (hidden[c] ? -Infinity : s));
  run = online(row, VALUES.map((v) => [v]), keyBlocks(set.order, N, set.B)); // prettier-ignore
  const all = run.flatMap(({ l, o }) => [l, o[0]]);
  sums = [Math.min(0, Math.floor(Math.min(...all))), Math.max(1, Math.ceil(Math.max(...all)))];
  transport.length(run.length);
}

// Drawing -------------------------------------------------------------------------------------------------------------

function measure() {
  const width = stage.clientWidth;
  const narrow = width < 560;
  const side = narrow ? 0 : deck ? 270 : 300; // the state is beside the bars, or below
  const left = 26;
  const column = (width - left - side) / N;
  const mid = deck ? 180 : narrow ? 196 : 240; // the scores are above it, and the weights below
  const bottom = mid + (deck ? 108 : 128);
  place = { width, narrow, left, column, top: 12, mid, bottom, keys: bottom + 44, stateX: narrow ? 0 : width - side + 24 };
  place.height = bottom + (narrow ? 230 : 60);
  stage.setAttribute("viewBox", `0 0 ${width} ${place.height}`);
  stage.style.height = `${place.height}px`;
}

const center = (c) => place.left + (c + 0.5) * place.column;
const scoreY = (s) => place.mid - 8 - ((s - LOW) / (HIGH - LOW)) * (place.mid - 8 - place.top - 14);
const weightY = (w) => place.bottom - w * (place.bottom - place.mid - 26);

function draw(t) {
  if (!stage.clientWidth) return; // not laid out yet
  const step = run[t];
  marks.replaceChildren();
  measure();
  for (const c of step.block) drawBand(c); // beneath all lines
  drawAxes(step);
  for (const c of upTo(N)) drawKey(step, c);
  drawState(step);
  write($("say"), typeset(sentence(step)));
  $("note").textContent = answer(step);
}

function drawBand(c) {
  const { column, bottom } = place;
  shape(marks, "rect", { x: center(c) - column / 2, y: 2, width: column, height: bottom, class: "here" });
}

function drawAxes(step) {
  const { left, width, stateX, narrow, bottom } = place;
  const right = narrow ? width : stateX - 24;
  const line = (y, look) => shape(marks, "line", { x1: left, x2: right, y1: y, y2: y, class: look });
  const tick = (y, words) => shape(marks, "text", { x: left - 3, y: y + 4, class: "small end quiet" }, words);
  for (const y of [scoreY(0), bottom]) line(y, "axis");
  line(weightY(1), "axis faint");
  tick(scoreY(0), "0");
  tick(weightY(1), "1");
  tick(bottom, "0");
  shape(marks, "text", { x: 2, y: scoreY(0) + 4, class: "letter" }, "s");
  shape(marks, "text", { x: 2, y: (weightY(1) + bottom) / 2 + 4, class: "letter" }, step.op === "end" ? "P" : "p");
  shape(marks, "text", { x: 2, y: place.keys, class: "letter" }, "v");
  if (step.m === -Infinity) return;
  const y = scoreY(step.m);
  line(y, "maximum");
  shape(marks, "text", { x: 2, y: y + (Math.abs(step.m) < 1 ? (step.m < 0 ? 18 : -8) : 4), class: "letter halo" }, "m");
}

function drawKey(step, c) {
  const x = center(c);
  const { column, bottom, keys } = place;
  const here = step.block.includes(c);
  const seen = step.weights[c] !== null;
  drawHandle(c, x, seen || here);
  if (!hidden[c]) {
    shape(marks, "line", { x1: x, x2: x, y1: scoreY(0), y2: scoreY(scores[c]), class: seen || here ? "stem on" : "stem" });
    const y = scoreY(scores[c]);
    const beyond = scores[c] < 0 ? y + 23 : y - 14; // away from zero, or if the line m is there, at the side
    const at = Math.abs(scoreY(step.m) - beyond + 4) < 10 ? { x: x + 12, y: y + 4 } : { x, y: beyond };
    shape(marks, "text", { ...at, class: `small halo${at.x === x ? " middle" : ""}` }, show(scores[c], 1));
  }
  if (seen) {
    const y = weightY(step.weights[c]);
    shape(marks, "rect", { x: x - column * 0.32, y, width: column * 0.64, height: bottom - y, class: "weight" });
    if (step.op === "shrink" && step.rises) {
      const top = weightY(step.weights[c] / step.alpha);
      const box = { x: x - column * 0.32, width: column * 0.64, y: top, height: bottom - top };
      shape(marks, "rect", { ...box, class: "ghost" });
    }
    shape(marks, "text", { x, y: y - 4, class: "small middle halo" }, show(step.weights[c]));
  }
  shape(marks, "text", { x, y: keys, class: "small middle" }, show(VALUES[c], 1));
}

/** The handle of a score, and the number below it. */
function drawHandle(c, x, on) {
  const [handle, number] = handles[c];
  handle.style.display = hidden[c] ? "none" : "";
  handle.setAttribute("cx", x);
  handle.setAttribute("cy", scoreY(scores[c]));
  handle.setAttribute("class", on ? "grab on" : "grab");
  handle.setAttribute("aria-valuenow", scores[c].toFixed(1));
  number.setAttribute("transform", `translate(${x} ${place.bottom})`);
  number.setAttribute("aria-pressed", hidden[c]);
  number.lastChild.textContent = hidden[c] ? "−∞" : String(c + 1);
}

/** m as a number, since it is a line already; ℓ and o, which are sums of p, on one scale. */
function drawState(step) {
  const { narrow, stateX, width } = place;
  const high = narrow || deck ? 36 : 44;
  const [x, y, w] = narrow ? [0, place.keys + 30, width] : [stateX, place.height - 3 * high - 68, width - stateX - 4];
  const at = (v) => x + 24 + ((v - sums[0]) / (sums[1] - sums[0])) * (w - 76);
  const foot = y + 3 * high - 2;
  for (const v of upTo(sums[1] - sums[0] + 1).map((k) => sums[0] + k)) {
    shape(marks, "line", { x1: at(v), x2: at(v), y1: y + high, y2: foot, class: v ? "axis faint" : "axis" });
    shape(marks, "text", { x: at(v), y: foot + 14, class: "small middle quiet" }, show(v, 0));
  }
  const rows = [
    ["m", step.m],
    ["ℓ", step.l, "M dashed"],
    [step.op === "end" ? "O" : "o", step.o[0], "O"],
  ];
  rows.forEach(([name, v, hue], k) => {
    const top = y + k * high;
    shape(marks, "text", { x, y: top + 15, class: "letter" }, name);
    shape(marks, "text", { x: x + w, y: top + 15, class: "end" }, show(v));
    if (!hue) return;
    const box = (v) => ({ x: Math.min(at(0), at(v)), width: Math.abs(at(v) - at(0)), y: top - high / 2 + 19, height: high - 18 });
    shape(marks, "rect", { ...box(v), class: `length ${hue}` });
    if (step.op === "shrink" && step.rises) shape(marks, "rect", { ...box(v / step.alpha), class: "ghost" });
  });
  shape(marks, "text", { x: x + 24, y: y + 15, class: "small quiet" }, "the blue line");
  const shrinks = step.op === "shrink" && step.rises;
  const pill = step.op === "shrink" ? `α = ${show(step.alpha, 3)}` : "";
  const top = foot + (narrow ? 42 : 48);
  const soFar = step.op === "end" || !step.l ? "" : `o / ℓ = ${show(step.o[0] / step.l)} so far`;
  shape(marks, "text", { x: x + w, y: top, class: "small end" }, soFar);
  if (shrinks) shape(marks, "rect", { x, y: top - 18, width: 96, height: 26, rx: 13, class: "pill" });
  shape(marks, "text", { x: x + 12, y: top, class: shrinks ? "strong" : "small" }, pill);
}

function sentence(step) {
  const keys = step.block.map((c) => c + 1).join(" and ");
  const name = `${step.block.length > 1 ? "Keys" : "Key"} ${keys}`;
  if (step.op === "start") return "No key has been seen: m = −∞, ℓ = 0, o = 0. Press play, or step with ← and →.";
  if (step.op === "end" && step.m === -Infinity)
    return "Every key is hidden. ℓ is 0, so we divide by 1: O = 0 and L = −∞, and nothing is NaN.";
  if (step.op === "end")
    return "One division by ℓ at the end. Now the weights sum to 1, and the row is the softmax of all scores.";
  if (step.op === "add") return `${name}: each adds p = e^(s − m) to ℓ, and p v to o.`;
  if (step.before === -Infinity)
    return `${name}: the first maximum is ${show(step.m)}. Nothing is summed yet, so nothing shrinks.`;
  if (step.rises)
    return `${name}: a larger score shrinks all earlier weights, ℓ and o by α\u00a0=\u00a0${power(step.before, step.m, step.alpha)}. Dashed edges show them before.`;
  return `${name}: no score is larger than ${show(step.m)}. α = 1, and nothing shrinks.`;
}

function answer(step) {
  if (step.op !== "end") return "";
  const other = ["forward", "backward", "outside in"].map((order) => {
    const row = scores.map((s, c) => (hidden[c] ? -Infinity : s));
    return online(row, VALUES.map((v) => [v]), keyBlocks(order, N, set.B)).at(-1).o[0]; // prettier-ignore
  });
  const apart = Math.max(...other) - Math.min(...other);
  return `O = ${show(step.o[0], 4)}, L = ${show(step.L, 4)}. The three orders differ by ${apart.toExponential(0)}.`;
}

// What the reader does ------------------------------------------------------------------------------------------------

function move(c, s) {
  scores[c] = Math.round(10 * Math.min(HIGH, Math.max(LOW, s))) / 10;
  prepare();
  transport.show();
}

function drag(event, c) {
  event.preventDefault();
  transport.pause();
  const handle = event.target;
  handle.setPointerCapture(event.pointerId);
  handle.focus();
  const start = { y: event.clientY, s: scores[c] };
  const scale = (HIGH - LOW) / (place.mid - 22 - place.top);
  handle.onpointermove = (e) => move(c, start.s + (start.y - e.clientY) * scale);
  handle.onpointerup = handle.onpointercancel = () => (handle.onpointermove = null);
}

function press(event, c) {
  const change = { ArrowUp: 0.1, ArrowDown: -0.1 }[event.key];
  if (!change) return;
  event.preventDefault();
  move(c, scores[c] + change);
}

form.oninput = () => {
  const share = transport.t / transport.last;
  read(form, set);
  transport.pause();
  prepare();
  transport.go(Math.round(share * transport.last));
};
$("undo").onclick = () => {
  scores = [...SCORES];
  hidden = SCORES.map(() => false);
  prepare();
  transport.show();
};

mark(form, set);
prepare();
transport.go(ask.has("step") ? Number(ask.get("step")) : run.findIndex(({ rises }) => rises));
onWidth(stage, () => transport.show());
