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
const OTHER = { fa1: ["fa2", "FA2"], fa2: ["fa1", "FA1"] };

form.innerHTML = [
  ...Object.entries(LIMITS).map(([name, [low, high]]) => slider(name, LABELS[name], upTo(high + 1).slice(low))),
  choice("algorithm", "algorithm", [["fa1", "FA1"], ["fa2", "FA2"]]),
  choice("pass", "direction", [["forward"], ["backward"]]),
  choice("mask", "causal", [["true", "causal"]], "checkbox"),
  choice("order of thread blocks", "order", [["rows", "as they come"], ["heaviest first"]]),
].join(""); // prettier-ignore
const transport = new Transport($("transport"), { draw, dwell: () => 140 });

function prepare() {
  for (const [name, [low, high]] of Object.entries(LIMITS)) whole(LABELS[name], set[name], low, high);
  const tiling = { N_q: set.blocks, N_k: set.blocks, B_r: 1, B_c: 1, causal: set.causal };
  const run = (algorithm) => timetable(programs(set.heads, tiling, { ...set, algorithm }), set.SMs);
  [table, other] = [run(set.algorithm), run(OTHER[set.algorithm][0])];
  transport.length(table.makespan + 1);
}

function draw(t) {
  if (!stage.clientWidth || !table) return; // not laid out yet, or refused
  const width = stage.clientWidth;
  const lane = Math.max(14, Math.min(30, 320 / set.SMs));
  const [left, top] = [44, 8];
  const longest = Math.max(table.makespan, other.makespan, 1); // one axis for both
  const unit = (width - left - 4) / longest;
  const height = top + set.SMs * lane + 42;
  clear(stage, height);
  for (const k of upTo(set.SMs)) {
    const y = top + k * lane;
    shape(stage, "rect", { x: left, y, width: width - left - 4, height: lane - 2, class: "lane" });
    shape(stage, "text", { x: 0, y: y + lane / 2 + 3, class: "small" }, lane > 12 ? `SM ${k}` : "");
  }
  for (const p of table.placed) drawProgram(p, t, { left, top, lane, unit });
  for (const [k, end] of lastEnds(other).entries())
    shape(stage, "rect", { x: left, y: top + k * lane, width: end * unit, height: lane - 2, class: "ghost" });
  const now = left + t * unit;
  shape(stage, "line", { x1: now, x2: now, y1: top - 6, y2: top + set.SMs * lane, class: "clock" });
  shape(stage, "text", { x: left, y: height - 6, class: "small" }, "time, in tiles →");
  drawEnd(table, set.algorithm.toUpperCase(), height - 22);
  drawEnd(other, `${OTHER[set.algorithm][1]} (dashed)`, height - 6);

  function drawEnd({ makespan }, name, y) {
    const x = left + makespan * unit;
    shape(stage, "line", { x1: x, x2: x, y1: top + set.SMs * lane, y2: y - 10, class: "axis" });
    const side = x > left + 260 ? "small end" : "small";
    shape(stage, "text", { x: x > left + 260 ? x : x + 3, y, class: side }, `${name} ends at ${makespan}`);
  }
  words(t);
}

/** When each SM that works has done its last thread block. */
function lastEnds({ placed }) {
  const ends = [];
  for (const { SM, end } of placed) ends[SM] = Math.max(ends[SM] || 0, end);
  return ends;
}

function drawProgram(p, t, { left, top, lane, unit }) {
  if (!p.cost) return;
  const x = left + p.start * unit;
  const state = t >= p.end ? "done" : t > p.start ? "running" : "ahead";
  const e = shape(stage, "rect", {
    x,
    y: top + p.SM * lane,
    width: Math.max(1, p.cost * unit - 1),
    height: lane - 2,
    class: `program ${state}`,
    fill: SHADES[p.head % 4][0],
  });
  const what =
    p.index === null ? "all tiles" : `${set.direction === "forward" ? "row" : "column"} block ${p.index + 1}`;
  shape(e, "title", {}, `head ${p.head + 1}, ${what}: ${p.cost} tiles, from ${p.start} to ${p.end} on SM ${p.SM}`);
  if (p.cost * unit > 22 && lane >= 14) {
    const label = p.index === null ? `head ${p.head + 1}` : String(p.index + 1);
    const at = {
      x: x + (p.cost * unit) / 2,
      y: top + p.SM * lane + lane / 2 + 3,
      class: `small middle in ${state}`,
      style: state === "ahead" ? "" : `fill: ${SHADES[p.head % 4][1]}`,
    };
    shape(stage, "text", at, label);
  }
}

function words(t) {
  const running = table.placed.filter((p) => p.start <= t && t < p.end).length;
  const waiting = table.placed.filter((p) => p.start > t).length;
  const idle = set.SMs - new Set(table.placed.filter((p) => p.start <= t && t < p.end).map((p) => p.SM)).size;
  const end = `The last thread block ends at ${table.makespan}; SMs work ${percent(table.busy)} of the time until then.`;
  const now =
    t === table.last || !running ? end : `At ${t}: ${running} run, ${waiting} wait, ${idle} of ${set.SMs} SMs idle. ${end}`;
  write($("say"), now);
  stage.setAttribute("aria-label", `${set.SMs} SMs. ${now}`);
  const fewest = Math.ceil(table.placed.reduce((x, p) => x + p.cost, 0) / set.SMs);
  $("note").textContent =
    `If the work could be cut anywhere, it would end at ${fewest}. The number in a box is its row block (backward: column block), and each head has its own fill. An SM runs one thread block at a time.`;
}

follow(form, set, () => {
  transport.pause();
  prepare();
  for (const e of form.elements.order) e.disabled = set.algorithm === "fa1";
  transport.go(transport.last);
});
if (ask.has("step")) transport.go(Number(ask.get("step")));
onWidth(stage, () => transport.show());
