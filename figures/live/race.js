/* The race for dQ: above, one pass with atomic adds; below, two passes. One time axis, in products of a tile. */
"use strict";

const set = { blocks: 4, causal: false };
const form = $("settings");
const stage = $("stage");
const WAYS = ["One pass, atomic adds", "Two passes"];
let seed = 1;
let ways = [];
let before = null; // the sums of the run before, if the same input was run again

form.innerHTML = [
  slider("blocks", "row and key blocks", [2, 3, 4, 5, 6]),
  choice("mask", "causal", [["true", "causal"]], "checkbox"),
  `<fieldset><legend>the same input</legend><button type="button" id="again">run both again</button></fieldset>`,
].join("");
const transport = new Transport($("transport"), { draw, dwell: () => 420 });

function prepare() {
  const n = whole("blocks", set.blocks, 2, 6);
  before = null;
  ways = race({ N_q: n, N_k: n, B_r: 1, B_c: 1, causal: set.causal }, seed);
  transport.length(Math.max(...ways.map(({ end }) => end)) + 1);
}

function draw(t) {
  if (!stage.clientWidth || !ways.length) return; // not laid out yet, or refused
  const [lane, left, right] = [Math.min(21, Math.floor(92 / set.blocks)), 66, 12];
  const unit = (stage.clientWidth - left - right) / transport.last;
  const high = 2 * set.blocks * lane + 58;
  clear(stage, 2 * high + 32);
  const x = left + t * unit;
  for (const top of [24, high + 24]) shape(stage, "line", { x1: x, x2: x, y1: top - 4, y2: top + high - 40, class: "clock" });
  ways.forEach((way, n) => drawWay(way, WAYS[n], t, { lane, left, unit, top: n * high + 24 })); // its words lie on the line
  drawAxis(left, unit, 2 * high - 14);
  $("entries").replaceChildren(...ways.map((way, n) => entries(way, n, t)));
  write($("say"), sentence(t));
  stage.setAttribute("aria-label", sentence(t));
}

/** The time axis of both ways. */
function drawAxis(left, unit, y) {
  shape(stage, "line", { x1: left, x2: left + transport.last * unit, y1: y, y2: y, class: "axis" });
  for (let x = 0; x <= transport.last; x += unit < 7 ? 10 : 5) {
    shape(stage, "line", { x1: left + x * unit, x2: left + x * unit, y1: y, y2: y + 5, class: "axis" });
    shape(stage, "text", { x: left + x * unit, y: y + 18, class: "small middle" }, String(x));
  }
  shape(stage, "text", { x: left, y: y + 36, class: "small" }, "time, in matmuls of one tile →");
}

/** The first of some words that a box has room for. */
const fitting = (words, width) => words.find((word) => word.length * 7.4 < width);

/** The workers as lanes, and below them the blocks of dQ with every addition. */
function drawWay({ visits, writes, end }, name, t, { lane, left, unit, top }) {
  shape(stage, "text", { x: 0, y: top - 8, class: "strong" }, `${name}: ends after ${end}`);
  for (const k of upTo(set.blocks))
    shape(stage, "text", { x: 0, y: top + k * lane + 0.66 * lane, class: "small" }, `worker ${k + 1}`);
  for (const { worker, from, to, i } of visits) {
    const state = t >= to ? "" : t > from ? " running" : " ahead";
    const at = { x: left + from * unit, y: top + worker * lane, width: (to - from) * unit - 1, height: lane - 3 };
    shape(stage, "rect", { ...at, class: `visit${state}` });
    const words = fitting(i === null ? ["dK, dV", "dK,dV", "KV"] : [`dQ ${i + 1}`, `dQ${i + 1}`, `Q${i + 1}`], at.width);
    const text = { x: at.x + at.width / 2, y: at.y + at.height / 2 + 4, class: `small${stage.clientWidth < 560 ? " tiny" : ""} middle in${state}` };
    if (words) shape(stage, "text", text, words);
  }
  const below = top + set.blocks * lane + 22;
  shape(stage, "text", { x: 0, y: below - 5, class: "small quiet" }, "who adds to dQ");
  for (const i of upTo(set.blocks)) {
    const y = below + i * lane;
    shape(stage, "text", { x: 0, y: y + 0.66 * lane, class: "small" }, `dQ ${i + 1}`);
    const all = writes.filter((write) => write.i === i);
    if (name === WAYS[1]) drawKept(visits.filter((visit) => visit.i === i), t, { left, unit, y, lane }); // prettier-ignore
    for (const { time, workers } of all.filter((write) => write.time <= t)) {
      const width = workers.length > 1 ? 30 : 18;
      const box = { x: left + time * unit - width, y, width, height: lane - 3 };
      shape(stage, "rect", { ...box, class: `write Q${workers.length > 1 ? " meet" : ""}` });
      const mark = workers.length > 1 ? `× ${workers.length}` : workers[0] + 1;
      shape(stage, "text", { x: box.x + width / 2, y: y + box.height / 2 + 4, class: "small middle in" }, String(mark));
    }
  }
}

/** In the second pass, a worker keeps its block of dQ on the chip until it is whole. */
function drawKept(visits, t, { left, unit, y, lane }) {
  const [from, to] = [visits[0].from, Math.min(t, visits.at(-1).to)];
  if (to <= from) return;
  shape(stage, "rect", { x: left + from * unit, y: y + 2, width: (to - from) * unit, height: lane - 7, class: "kept Q" });
}

/** The entries of one way that are whole, and beside them those of the run before. */
function entries({ writes, sums }, n, t) {
  const table = make("table", "", make("caption", "", WAYS[n]), make("thead"), make("tbody"));
  const line = (part, kind, cells) => part.append(make("tr", "", ...cells.map((cell) => make(kind, "", cell))));
  line(table.tHead, "th", before ? ["", `run ${seed - 1}`, `run ${seed}`] : ["", `run ${seed}`]);
  for (const i of upTo(set.blocks)) {
    const whole = writes.every((write) => write.i !== i || write.time <= t);
    const now = show(sums[i], 7);
    const old = before && show(before[n][i], 7);
    const cells = !whole ? ["…"] : !old ? [now] : old === now ? [old, make("i", "", "the same")] : [changed(old, now), changed(now, old)];
    if (!whole && before) cells.unshift(old);
    line(table.tBodies[0], "td", [`dQ ${i + 1}`, ...cells]);
  }
  return table;
}

/** A number, whose digits are marked from the first one on that another number has otherwise. */
function changed(x, other) {
  const same = [...x].findIndex((digit, k) => digit !== other[k]);
  return make("span", "", x.slice(0, same), make("mark", "", x.slice(same)));
}

/** How many sums of each way differ from those of the run before. */
function differences() {
  const changed = ways.map(({ sums }, way) => sums.filter((x, i) => show(x, 7) !== show(before[way][i], 7)).length);
  if (!changed[0]) {
    const meets = ways[0].writes.some(({ workers }) => workers.length > 1);
    const why = meets ? "With atomic adds, that is luck, so run both once more." : "No two workers meet here, so even atomic adds have one order.";
    return `The same input, run again: all digits are as before. ${why} With two passes, it is certain.`;
  }
  const [one, two] = changed.map((n) => `${n || "none"} of ${set.blocks}`);
  return `The same input, run again: with atomic adds, ${one} entries ${changed[0] === 1 ? "has" : "have"} other last digits, and with two passes ${two}.`;
}

function sentence(t) {
  const [one, two] = ways;
  const now = one.writes.filter(({ time, workers }) => time === t && workers.length > 1);
  if (t === 0) return "All workers start together. Watch which workers add to dQ, and when.";
  if (t === transport.last && before) return differences();
  if (t === transport.last) {
    const later = (two.end / one.end).toFixed(2);
    return `Counted in matmuls, two passes take ${later} times as long, because they compute S and dP twice. (An atomic add takes no time on this axis, but it does on a GPU.) Now run both again. With atomic adds, the last digits of dQ change, and with two passes they never do.`;
  }
  if (now.length) {
    const [{ i, workers }] = now;
    return `${workers.length} workers add to block ${i + 1} of dQ at the same time. In this run they come in the order ${workers.map((w) => w + 1).join(", ")}.`;
  }
  if (t >= one.end) return "One pass has ended. Of two passes the second is at work: each block of dQ has one worker.";
  const second = Math.min(...two.visits.filter(({ i }) => i !== null).map(({ from }) => from));
  return t < second
    ? "With atomic adds, every tile ends with an addition to dQ. The first of two passes adds nothing to dQ."
    : "The second pass computes S and dP again, and each worker keeps its block of dQ on chip until the end.";
}

$("again").onclick = () => {
  const sums = ways.map((way) => way.sums);
  seed += 1;
  prepare();
  before = sums;
  transport.jump(transport.last);
};
follow(form, set, () => {
  transport.pause();
  prepare();
  transport.go(ways[0].writes[0].time);
});
$("note").textContent =
  "A box is a tile. With atomic adds it takes five matmuls, and in the two passes it takes four and three. A mark × 4 means that 4 workers add at the same time. The table has one entry of each block of dQ, summed in float32 in the order of its run. Both ways add the same numbers, but in different orders, so their last digits can differ.";
if (ask.has("step")) transport.go(Number(ask.get("step")));
onWidth(stage, () => transport.show());
