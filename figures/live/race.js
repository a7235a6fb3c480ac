/* The race for dQ: above, one pass with atomic adds; below, two passes. Each way is as long as it was measured. */
"use strict";

const set = { blocks: 4, causal: false };
const form = $("settings");
const stage = $("stage");
const WAYS = ["One pass, atomic adds", "Two passes"];
const BEGIN = 12; // the first run has the seed after it: in the next one, many sums are others
let run = 2;
let ways = [];
let before = []; // the sums of the run before, on the same input
let moments = []; // the times, in ms, at which a way ends a tile

form.innerHTML = [
  slider("blocks", "row and key blocks", [2, 3, 4, 5, 6]),
  choice("mask", "causal", [["true", "causal"]], "checkbox"),
].join("");
const transport = new Transport($("transport"), { draw, dwell: () => 900, anew: true });

function prepare() {
  const n = whole("blocks", set.blocks, 2, 6);
  const tiling = { N_q: n, N_k: n, B_r: 1, B_c: 1, causal: set.causal };
  before = race(tiling, BEGIN + run - 1).map(({ sums }) => sums);
  ways = race(tiling, BEGIN + run).map((way, n) => measured(way, MEASURED[set.causal ? "causal" : "full"][n]));
  moments = [...new Set([0, ...ways.flatMap(({ visits }) => visits.map(({ to }) => to))])].sort((a, b) => a - b);
  transport.length(moments.length);
}

/** A way whose times in matmuls become milliseconds, so that it ends when it did on a GPU. */
function measured({ visits, writes, end, sums }, ms) {
  const at = (time) => (time * ms) / end;
  return {
    visits: visits.map((visit) => ({ ...visit, from: at(visit.from), to: at(visit.to) })),
    writes: writes.map((write) => ({ ...write, time: at(write.time) })),
    lanes: lanesOf(visits.map((visit) => ({ ...visit, from: at(visit.from), to: at(visit.to) }))),
    matmuls: end,
    end: at(end),
    sums,
  };
}

/** A lane for each worker, or a single one if all workers begin and end their tiles together. */
function lanesOf(visits) {
  const target = ({ i }) => (i === null ? "dK, dV" : `dQ ${i + 1}`);
  const lanes = upTo(set.blocks).map((k) => visits.filter(({ worker }) => worker === k));
  const together = lanes.every((lane) => lane.length === lanes[0].length && lane.every(({ to }, n) => to === lanes[0][n].to));
  if (!together) return lanes.map((lane, k) => ({ name: `worker ${k + 1}`, tiles: lane.map((visit) => ({ ...visit, word: target(visit) })) }));
  const tiles = lanes[0].map((visit, n) => {
    const same = lanes.every((lane) => lane[n].i === visit.i);
    return { ...visit, word: same ? target(visit) : `dQ 1–${set.blocks}` };
  });
  return [{ name: `workers 1–${set.blocks}`, tiles }];
}

function draw(step) {
  if (!stage.clientWidth || !ways.length) return; // not laid out yet, or refused
  const t = moments[step];
  const narrow = stage.clientWidth < 560;
  const [left, right] = [84, 56];
  const lane = ({ lanes }) => (lanes.length === 1 ? 28 : Math.min(narrow ? 17 : 20, Math.floor(92 / lanes.length)));
  const unit = (stage.clientWidth - left - right) / moments.at(-1);
  const high = ways.map((way) => way.lanes.length * lane(way) + set.blocks * TICK + 34 + LINE);
  clear(stage, sum(high) + 30);
  const words = shape(stage, "g");
  const x = left + t * unit;
  ways.forEach((way, n) => {
    const [top, lanes] = [n * high[0] + 20, way.lanes.length * lane(way)];
    drawWay(way, WAYS[n], t, { lane: lane(way), left, unit, narrow, words, top });
    for (const [y, tall] of [[top - 3, lanes], [top + lanes + LINE, set.blocks * TICK]]) // not through the words
      shape(stage, "line", { x1: x, x2: x, y1: y, y2: y + tall + 4, class: "clock" });
  });
  stage.append(words); // over the line
  drawAxis(left, unit, sum(high) - 10, t);
  $("entries").replaceChildren(...ways.map((way, n) => entries(way, n, t)));
  write($("say"), sentence(t));
  stage.setAttribute("aria-label", sentence(t));
}

/** The time axis of both ways; at the line that crosses both, it has the time that is shown. */
function drawAxis(left, unit, y, t) {
  shape(stage, "line", { x1: left, x2: left + moments.at(-1) * unit, y1: y, y2: y, class: "axis" });
  for (let x = 0; x <= moments.at(-1); x += 1) {
    shape(stage, "line", { x1: left + x * unit, x2: left + x * unit, y1: y, y2: y + 5, class: "axis" });
    if (Math.abs(x - t) * unit > 22) shape(stage, "text", { x: left + x * unit, y: y + 18, class: "small middle" }, String(x));
  }
  shape(stage, "text", { x: left + t * unit, y: y + 18, class: "small middle strong" }, t.toFixed(t ? 1 : 0));
  shape(stage, "text", { x: left, y: y + 36, class: "small" }, "measured time, in ms →");
}

const [WIDE, TICK] = [20, 16]; // an addition: its width, if there is room, and its height
const LINE = 17; // the height of the line of words above the additions

/** The first of some words that a box has room for. */
const fitting = (words, width, letter = 7.4) => words.find((word) => word.length * letter < width);

/** The workers as lanes, and below them a lane with the additions to each block of dQ. */
function drawWay(way, name, t, { lane, left, unit, narrow, words, top }) {
  const { lanes, visits, writes, matmuls, end } = way;
  shape(words, "text", { x: 0, y: top - 8, class: "strong halo" }, `${narrow ? name.split(",")[0] : name}: ${matmuls} matmuls`);
  shape(words, "text", { x: left + end * unit + 6, y: top + lane / 2 + 3, class: "small strong" }, `${end.toFixed(1)} ms`);
  const begin = visits.find(({ i }) => i === null) && Math.min(...visits.filter(({ i }) => i !== null).map(({ from }) => from));
  for (const [k, { name, tiles }] of lanes.entries()) {
    const y = top + k * lane;
    shape(stage, "text", { x: 0, y: y + lane / 2 + 3, class: "small" }, name);
    for (const { from, to, i } of tiles) {
      const state = t >= to ? "" : t > from ? " running" : " ahead";
      const at = { x: left + from * unit, y, width: (to - from) * unit - 1, height: lane - 3 };
      shape(stage, "rect", { ...at, class: `visit${state}${i !== null ? " Q" : ""}` });
    }
    for (const { from, to, i, word } of tiles) { // over all boxes, because a short one has the name of all that follow
      const [width, at] = [(to - from) * unit, { y: y + lane / 2 + 2.5 }];
      const look = `small in on-visit ${i === null ? "S" : "Q"}${t > from ? "" : " ahead"}`;
      if (word.length * 7.4 + 10 < width) shape(words, "text", { ...at, x: inBox(left + from * unit, width, 3.7 * word.length, left + t * unit), class: `${look} middle` }, word);
      else if (from === 0 || from === begin) shape(words, "text", { ...at, x: left + from * unit + 4, class: look }, word);
    }
  }
  const below = top + lanes.length * lane + 3;
  shape(stage, "text", { x: 0, y: below + 11, class: "small quiet" }, "adds to");
  for (const i of upTo(set.blocks)) {
    const y = below + LINE + i * TICK;
    shape(stage, "text", { x: 0, y: y + 11.5, class: "small" }, `dQ ${i + 1}`);
    shape(stage, "rect", { x: left, y, width: end * unit, height: TICK - 2, class: "lane" });
  }
  if (name === WAYS[1]) drawKept(way, t, { left, unit, words, y: below });
  const most = Math.max(...writes.map(({ workers }) => workers.length));
  const wide = Math.min(WIDE, (Math.min(...writes.map(({ time }) => time)) * unit) / most);
  for (const write of writes) if (write.time <= t) drawAdds(write, left + write.time * unit, below + LINE, wide);
}

/** What is added to a block of dQ at one moment: a box for each worker, from the first on the left to the last. */
function drawAdds({ i, workers }, x, y, wide) {
  workers.forEach((worker, k) => {
    const at = { x: x - (workers.length - k) * wide, y: y + i * TICK };
    shape(stage, "rect", { ...at, width: wide - 1, height: TICK - 2, class: "visit Q" });
    shape(stage, "text", { x: at.x + wide / 2, y: at.y + 11.5, class: "small middle" }, String(worker + 1));
  });
}

/** In the second pass, the workers keep their blocks of dQ on the chip until they are whole. */
function drawKept({ visits, writes }, t, { left, unit, words, y }) {
  const second = visits.filter(({ i }) => i !== null);
  const [from, to] = [Math.min(...second.map((visit) => visit.from)), Math.max(...second.map((visit) => visit.to))];
  const name = (texts, x, width) => {
    const text = fitting(texts, width, 6.6);
    if (text) shape(words, "text", { x: left + x * unit, y: y + 11, class: "small tiny quiet halo" }, text);
  };
  name(["pass 1: nothing is added to dQ", "pass 1: no dQ"], 0, from * unit);
  if (t <= from) return;
  for (const { i, time } of writes)
    shape(stage, "rect", { x: left + from * unit, y: y + LINE + i * TICK, width: (Math.min(t, time) - from) * unit, height: TICK - 2, class: "kept Q" });
  name(["pass 2: dQ on chip", "dQ on chip"], from, (to - from) * unit - 18);
}

/** The entries of one way that are whole, and beside them those of the run before. */
function entries({ writes, sums }, n, t) {
  const table = make("table", "", make("caption", "", WAYS[n]), make("thead"), make("tbody"));
  const line = (part, kind, cells) => part.append(make("tr", "", ...cells.map((cell) => make(kind, "", cell))));
  line(table.tHead, "th", ["", `run ${run - 1}`, `run ${run}`]);
  for (const i of upTo(set.blocks)) {
    const whole = writes.every((write) => write.i !== i || write.time <= t);
    const now = show(sums[i], 7);
    const old = show(before[n][i], 7);
    const same = matchMedia("(max-width: 420px)").matches ? "=" : "the same";
    const cells = !whole ? [old, "…"] : old === now ? [old, make("i", "", same)] : [changed(old, now), changed(now, old)];
    line(table.tBodies[0], "td", [`dQ ${i + 1}`, ...cells]);
  }
  return table;
}

/** A number, whose digits are marked from the first one on that another number has otherwise. */
function changed(x, other) {
  const same = [...x].findIndex((digit, k) => digit !== other[k]);
  return make("span", "", x.slice(0, same), make("mark", "", x.slice(same)));
}

/** How many sums of the atomic adds differ from those of the run before; with two passes, none does. */
function differences() {
  const changed = ways[0].sums.filter((x, i) => show(x, 7) !== show(before[0][i], 7)).length;
  if (!changed) {
    const most = Math.max(...ways[0].writes.map(({ workers }) => workers.length));
    const reasons = [
      "No two workers meet here, so even atomic adds have one order.",
      "A sum of two numbers is the same in both orders.",
    ];
    const why = reasons[most - 1] || "With atomic adds, that is luck, so run both once more.";
    return `All digits are as in the run before. ${why} With two passes, it is certain.`;
  }
  const some = `${changed} of ${set.blocks} entries ${changed === 1 ? "has" : "have"}`;
  return `With atomic adds, ${some} other last digits in run ${run} than in run ${run - 1}. With two passes, all digits are the same.`;
}

function sentence(t) {
  const [one, two] = ways;
  const now = one.writes.filter(({ time, workers }) => time === t && workers.length > 1);
  const ended = t >= two.end ? "Two passes have ended. " : "";
  if (t === 0) return "All workers start together. Watch which workers add to dQ, and when.";
  if (t === one.end)
    return `${differences()} Two passes end first, although they compute S and dP twice and thus run ${two.matmuls} matmuls instead of ${one.matmuls}.`;
  if (now.length) {
    const [{ i, workers }] = now;
    const other = one.writes.every((write) => write.i !== i || write.time <= t) && show(one.sums[i], 7) !== show(before[0][i], 7);
    const so = other ? `, so its last digits are not those of run ${run - 1}` : "";
    return `${ended}In one pass, ${workers.length} workers add to block ${i + 1} of dQ at once, in this run in the order ${workers.map((w) => w + 1).join(", ")}${so}.`;
  }
  if (ended) return `${ended}One pass is still at work.`;
  const second = Math.min(...two.visits.filter(({ i }) => i !== null).map(({ from }) => from));
  return t < second
    ? "In one pass, every tile ends with an addition to dQ. The first of two passes adds nothing to dQ."
    : "The second pass computes S and dP again, and each worker keeps its block of dQ on chip until the end.";
}

$("again").onclick = () => {
  run += 1;
  prepare();
  transport.jump(transport.last);
};
follow(form, set, () => {
  transport.pause();
  prepare();
  transport.jump(transport.last);
});
$("note").textContent =
  `A box is a tile, and its label names what the tile adds to. If all workers begin and end their tiles together, one lane shows all of them. A small box is one addition, and its number is the worker that adds. If several workers add at once, the first one is on the left. A tile takes five matmuls in one pass, and four and then three in two passes. Each way is as long as the simple kernels of chapter 09 took (${MEASURED.made}), and its matmuls share that time evenly. The table has one entry of each block of dQ, summed in float32 in the order of its run. Both ways add the same numbers, but in different orders, so their last digits can differ.`;
if (ask.has("step")) transport.jump(Number(ask.get("step")));
onWidth(stage, () => transport.show());
