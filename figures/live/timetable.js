/* Thread blocks on SMs over time: a lane for each SM, a box for each thread block. */
"use strict";

const set = { SMs: 8, heads: 2, blocks: 12, causal: true, algorithm: "fa2", direction: "forward", order: "rows" };
const form = $("settings");
const stage = $("stage");
const LIMITS = { SMs: [1, 32], heads: [1, 16], blocks: [1, 32] };
const LABELS = { SMs: "SMs", heads: "heads", blocks: "row blocks" };
const SHADES = [["#586a7e", "#fff"], ["#93a1ae", "#222"], ["#38506b", "#fff"], ["#b4bec8", "#222"]]; // prettier-ignore
let table = null;
let other = null; // the timetable of the other algorithm
let swapped = null; // the timetable in the other order
const OTHER = { fa1: ["fa2", "FA2"], fa2: ["fa1", "FA1"] };

form.innerHTML = [
  ...Object.entries(LIMITS).map(([name, [low, high]]) => slider(name, LABELS[name], upTo(high + 1).slice(low))),
  choice("algorithm", "algorithm", [["fa1", "FA1"], ["fa2", "FA2"]]),
  choice("pass", "direction", [["forward"], ["backward"]]),
  choice("mask", "causal", [["true", "causal"]], "checkbox"),
  choice("order of thread blocks", "order", [["rows", "as they come"], ["heaviest first"]]),
].join(""); // prettier-ignore
const transport = new Transport($("transport"), { draw, dwell: () => Math.min(300, 8000 / transport.last), anew: true });

function prepare() {
  for (const [name, [low, high]] of Object.entries(LIMITS)) whole(LABELS[name], set[name], low, high);
  const tiling = { N_q: set.blocks, N_k: set.blocks, B_r: 1, B_c: 1, causal: set.causal };
  const run = (change) => timetable(programs(set.heads, tiling, { ...set, ...change }), set.SMs);
  const order = set.order === "rows" ? "heaviest first" : "rows";
  [table, other, swapped] = [run({}), run({ algorithm: OTHER[set.algorithm][0] }), run({ order })];
  transport.length(table.makespan + 1);
}

function draw(t) {
  if (!stage.clientWidth || !table) return; // not laid out yet, or refused
  const width = stage.clientWidth;
  const lane = Math.max(14, Math.min(30, 320 / set.SMs));
  const [left, top] = [44, 44];
  const both = Math.max(table.makespan, swapped.makespan); // so that both orders have the same axis
  const cut = other.makespan > 1.5 * both; // the other one runs on beyond the axis
  const right = cut ? Math.min(90, 0.11 * width) : 14;
  const longest = Math.max(both, cut ? 0 : other.makespan, 1);
  const unit = (width - left - right) / longest;
  const foot = top + set.SMs * lane;
  const narrow = width < 600;
  clear(stage, foot + (narrow ? 79 : 60));
  for (const k of upTo(set.SMs)) {
    const y = top + k * lane;
    shape(stage, "rect", { x: left, y, width: table.makespan * unit, height: lane - 2, class: "lane" });
    shape(stage, "text", { x: 0, y: y + lane / 2 + 3, class: "small" }, lane > 12 ? `SM ${k}` : "");
  }
  const place = { left, top, lane, unit };
  for (const p of table.placed) drawProgram(p, t, place);
  const now = left + t * unit;
  shape(stage, "line", { x1: now, x2: now, y1: top - 6, y2: foot + 4, class: "clock" });
  drawTotals({ left, foot, unit, width });
  drawOtherOrder(left + swapped.makespan * unit, left, top, foot);
  drawIdle(place, now);
  for (const p of table.placed) drawLabel(p, t, place, now);
  drawAxis({ left, foot, unit, longest });
  drawKey(left, foot + 55, narrow);
  drawHeads(left + (narrow ? 0 : 340), foot + (narrow ? 74 : 55));
  words(t);
}

/** What the looks of a box say about the time that is shown. */
function drawKey(x, y, narrow) {
  for (const [state, width] of [["done", 42], ["running", 58], ["ahead", 44], ["idle", 0]]) {
    const box = { x, y: y - 10, width: 16, height: 12 };
    shape(stage, "rect", { ...box, class: state === "idle" ? "lane" : `program ${state}`, fill: SHADES[0][0] });
    if (state === "done" && set.heads > 1) shape(stage, "rect", { ...box, x: x + 8, width: 8, fill: SHADES[1][0] });
    if (state === "running") shape(stage, "rect", { ...box, width: 8, fill: SHADES[0][0] });
    if (state === "idle") shape(stage, "rect", { ...box, style: "fill: url(#idle)", opacity: 0.6 });
    shape(stage, "text", { x: x + 21, y, class: "small" }, state === "ahead" ? "waits" : state);
    x += 21 + width + (narrow ? 0 : 20);
  }
}

/** How long both algorithms take, as two bars over the lanes; a bar that runs on beyond the axis has a torn end. */
function drawTotals({ left, foot, unit, width }) {
  const times = (other.makespan / (table.makespan || 1)).toFixed(1);
  const high = 17;
  for (const [y, run, name, words] of [
    [0, other, OTHER[set.algorithm][1], `ends at ${other.makespan}, ${times} times as long`],
    [20, table, set.algorithm.toUpperCase(), `ends at ${table.makespan}`],
  ]) {
    const torn = left + run.makespan * unit > width - 2;
    const end = torn ? width - 2 : left + run.makespan * unit;
    const teeth = torn ? `l-5 ${high / 4} l5 ${high / 4} l-5 ${high / 4} l5 ${high / 4}` : `v${high}`;
    shape(stage, "path", { d: `M${left} ${y + 1}H${end}${teeth}H${left}Z`, class: run === table ? "total now" : "total" });
    shape(stage, "text", { x: 0, y: y + 14, class: run === table ? "small strong" : "small" }, name);
    const inside = end - left > 6.6 * words.length + 12;
    shape(stage, "text", { x: inside ? left + 6 : end + 6, y: y + 14, class: !inside ? "small halo" : run === table ? "small on-total" : "small" }, words);
    if (run === table) shape(stage, "line", { x1: end, x2: end, y1: y, y2: foot, class: "end-line" });
  }
}

/** A dashed line where the last thread block would end in the other order. */
function drawOtherOrder(x, left, top, foot) {
  if (swapped.makespan === table.makespan) return;
  shape(stage, "line", { x1: x, x2: x, y1: top - 24, y2: foot, class: "ghost" });
  const later = swapped.makespan > table.makespan;
  const name = `${set.order === "rows" ? "heaviest first" : "as they come"}: `;
  const room = later ? x * (1 - table.makespan / swapped.makespan) : x - left - 90; // beside when this order ends
  const words = `${room > 140 ? name : ""}${swapped.makespan}`;
  shape(stage, "text", { x: x - 5, y: top - 10, class: `small end${later ? " halo" : " on-total"}` }, words);
}

/** Which fill is which head, if no two heads share one. */
function drawHeads(left, y) {
  if (set.heads > SHADES.length) return;
  for (const k of upTo(set.heads)) {
    const x = left + 68 * k;
    shape(stage, "rect", { x, y: y - 10, width: 11, height: 11, fill: SHADES[k][0] });
    shape(stage, "text", { x: x + 15, y, class: "small" }, `head ${k + 1}`);
  }
}

/** The time axis, in tiles, whose ticks are at least 40 pixels apart. */
function drawAxis({ left, foot, unit, longest }) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((x) => x * unit > 40) || longest;
  shape(stage, "line", { x1: left, x2: left + longest * unit, y1: foot + 3, y2: foot + 3, class: "axis" });
  for (let x = 0; x <= longest; x += step) {
    shape(stage, "line", { x1: left + x * unit, x2: left + x * unit, y1: foot + 3, y2: foot + 8, class: "axis" });
    shape(stage, "text", { x: left + x * unit, y: foot + 20, class: "small middle" }, String(x));
  }
  shape(stage, "text", { x: left, y: foot + 36, class: "small" }, "time, in tiles →");
}

/** When an SM has nothing to do, until the last thread block of all ends. */
function idleSpans({ placed, makespan }) {
  const spans = [];
  for (const SM of upTo(set.SMs)) {
    let from = 0;
    const own = placed.filter((p) => p.SM === SM && p.cost).sort((a, b) => a.start - b.start);
    for (const { start, end } of [...own, { start: makespan, end: makespan }]) {
      if (start > from) spans.push({ SM, from, to: start });
      from = Math.max(from, end);
    }
  }
  return spans;
}

/** Idle time is hatched, and named where the word has room. */
function drawIdle({ left, top, lane, unit }, now) {
  const hatch = shape(stage, "pattern", { id: "idle", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }); // prettier-ignore
  shape(hatch, "line", { x1: 0, x2: 0, y1: 0, y2: 7, style: "stroke: var(--quiet); stroke-width: 1.4" });
  for (const { SM, from, to } of idleSpans(table)) {
    const [x, y, width] = [left + from * unit, top + SM * lane, (to - from) * unit];
    const e = shape(stage, "rect", { x, y, width, height: lane - 2, fill: "url(#idle)", opacity: 0.6 });
    shape(e, "title", {}, `SM ${SM} idle from ${from} to ${to}`);
    if (width > 44 && lane > 18) shape(stage, "text", { x: inBox(x, width, 18, now), y: y + lane / 2 + 3, class: "small middle halo" }, "idle");
  }
}

const look = (p, t) => (t >= p.end ? "done" : t >= p.start ? "running" : "ahead");

function drawProgram(p, t, { left, top, lane, unit }) {
  if (!p.cost) return;
  const box = { x: left + p.start * unit, y: top + p.SM * lane, width: Math.max(1, p.cost * unit - 1), height: lane - 2, fill: SHADES[p.head % 4][0] }; // prettier-ignore
  if (look(p, t) === "running") // filled up to the time that is shown
    shape(stage, "rect", { ...box, width: Math.min(box.width, (t - p.start) * unit), class: "program" });
  const e = shape(stage, "rect", { ...box, class: `program ${look(p, t)}` });
  const what =
    p.index === null ? "all tiles" : `${set.direction === "forward" ? "row" : "column"} block ${p.index + 1}`;
  shape(e, "title", {}, `head ${p.head + 1}, ${what}: ${p.cost} tiles, from ${p.start} to ${p.end} on SM ${p.SM}`);
}

/** The number of a thread block, if there is room; its edge has the fill of the box, so that no line runs through. */
function drawLabel(p, t, { left, top, lane, unit }, now) {
  if (!p.cost) return;
  const state = look(p, t);
  const [fill, ink] = SHADES[p.head % 4];
  const label = p.index === null ? `head ${p.head + 1}` : String(p.index + 1);
  const room = p.cost * unit - 2;
  if (room > 7 * label.length + 4 && lane >= 14) {
    const x = inBox(left + p.start * unit, p.cost * unit, 4 * label.length, now);
    const at = {
      x,
      y: top + p.SM * lane + lane / 2 + 3,
      class: `small${room < 24 ? " tiny" : ""} middle in ${state}`,
      style: x > now ? "" : `fill: ${ink}; stroke: ${fill}; stroke-width: ${Math.min(3, lane / 8)}px; paint-order: stroke`,
    };
    shape(stage, "text", at, label);
  }
}

/** When the last thread block would end in the other order, if that changes anything. */
function inOtherOrder() {
  if (swapped.makespan === table.makespan) return "";
  return ` ${set.order === "rows" ? "With the heaviest first" : "As they come"}, it would end at ${swapped.makespan}.`;
}

function words(t) {
  const running = table.placed.filter((p) => look(p, t) === "running").length;
  const waiting = table.placed.filter((p) => look(p, t) === "ahead").length;
  const idle = set.SMs - running; // an SM runs one thread block at a time
  const name = set.algorithm.toUpperCase();
  const end = `${name}’s last thread block ends at ${table.makespan}, and until then the SMs work ${percent(table.busy)} of the time.${inOtherOrder()}`;
  const now =
    t === table.last || !running ? end : `At time ${t}, ${running} thread ${running === 1 ? "block runs" : "blocks run"}, ${waiting} ${waiting === 1 ? "waits" : "wait"}, and ${idle} of ${set.SMs} SMs ${idle === 1 ? "is" : "are"} idle. ${end}`;
  write($("say"), now);
  stage.setAttribute("aria-label", `${set.SMs} SMs. ${now}`);
  const fewest = Math.ceil(table.placed.reduce((x, p) => x + p.cost, 0) / set.SMs);
  $("note").textContent =
    `If the work could be cut anywhere, it would end at ${fewest}. The number in a box is its row block (backward: column block), and each head has its own fill. An SM runs one thread block at a time.`;
}

follow(form, set, () => {
  transport.pause();
  const share = table ? transport.t / transport.last : 0.5; // as far as in the run before
  prepare();
  for (const e of form.elements.order) e.disabled = set.algorithm === "fa1";
  transport.go(Math.round(share * transport.last));
});
if (ask.has("step")) transport.jump(Number(ask.get("step")));
onWidth(stage, () => transport.show());
