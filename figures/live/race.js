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
  slider("blocks", "blocks of rows and keys", [2, 3, 4, 5, 6]),
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
  const [lane, left, right] = [21, 66, stage.clientWidth < 560 ? 84 : 112];
  const unit = (stage.clientWidth - left - right) / transport.last;
  const high = 2 * set.blocks * lane + 58;
  clear(stage, 2 * high + 32);
  const x = left + t * unit;
  for (const top of [24, high + 24]) shape(stage, "line", { x1: x, x2: x, y1: top - 4, y2: top + high - 40, class: "clock" });
  ways.forEach((way, n) => drawWay(way, WAYS[n], t, { lane, left, unit, top: n * high + 24 })); // its words lie on the line
  drawAxis(left, unit, 2 * high - 14);
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

/** The workers as lanes, and below them the blocks of dQ with every addition. */
function drawWay({ visits, writes, end, sums }, name, t, { lane, left, unit, top }) {
  const last = before?.[WAYS.indexOf(name)];
  shape(stage, "text", { x: 0, y: top - 8, class: "strong" }, `${name}: ends after ${end}`);
  for (const k of upTo(set.blocks))
    shape(stage, "text", { x: 0, y: top + k * lane + 14, class: "small" }, `worker ${k + 1}`);
  const narrow = []; // boxes too narrow for their words, which are then written once for all of a worker's boxes
  for (const { worker, from, to, i } of visits) {
    const state = t >= to ? "" : t > from ? " running" : " ahead";
    const at = { x: left + from * unit, y: top + worker * lane, width: (to - from) * unit - 1, height: lane - 3 };
    shape(stage, "rect", { ...at, class: `visit${state}` });
    const words = i === null ? "dK, dV" : `dQ ${i + 1}`;
    const text = { x: at.x + at.width / 2, y: at.y + 13, class: `small middle in${state}` };
    if (at.width > 36) shape(stage, "text", text, words);
    else narrow.push({ worker, from, to, words });
  }
  for (const worker of upTo(set.blocks)) {
    const boxes = narrow.filter((box) => box.worker === worker);
    for (const words of new Set(boxes.map((box) => box.words))) {
      const same = boxes.filter((box) => box.words === words);
      const [from, to] = [Math.min(...same.map((box) => box.from)), Math.max(...same.map((box) => box.to))];
      const text = { x: left + ((from + to) / 2) * unit, y: top + worker * lane + 13 };
      if ((to - from) * unit > 40) shape(stage, "text", { ...text, class: `small middle in${t > from ? "" : " ahead"}` }, words);
    }
  }
  const below = top + set.blocks * lane + 22;
  const numbers = left + transport.last * unit + 8;
  shape(stage, "text", { x: 0, y: below - 5, class: "small quiet" }, "who adds to dQ");
  shape(stage, "text", { x: numbers, y: below - 5, class: "small quiet" }, "entry of dQ");
  for (const i of upTo(set.blocks)) {
    const y = below + i * lane;
    shape(stage, "text", { x: 0, y: y + 14, class: "small" }, `dQ ${i + 1}`);
    const all = writes.filter((write) => write.i === i);
    for (const { time, workers } of all.filter((write) => write.time <= t)) {
      const width = workers.length > 1 ? 30 : 18;
      const box = { x: left + time * unit - width, y, width, height: lane - 3 };
      shape(stage, "rect", { ...box, class: `write Q${workers.length > 1 ? " meet" : ""}` });
      const mark = workers.length > 1 ? `× ${workers.length}` : workers[0] + 1;
      shape(stage, "text", { x: box.x + width / 2, y: y + 13, class: "small middle in" }, String(mark));
    }
    const whole = all.every((write) => write.time <= t);
    if (whole) drawSum(show(sums[i], 7), last && show(last[i], 7), { x: numbers, y: y + 13 });
  }
}

/** A sum; the digits that the run before had otherwise are bold. */
function drawSum(now, old, at) {
  const same = [...now].findIndex((digit, k) => old && digit !== old[k]);
  const e = shape(stage, "text", { ...at, class: "small" }, same < 0 ? now : now.slice(0, same));
  if (same >= 0) shape(e, "tspan", { class: "changed" }, now.slice(same));
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
  return `The same input, run again: with atomic adds, ${one} entries ${changed[0] === 1 ? "has" : "have"} other last digits (bold), and with two passes ${two}.`;
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
  "A box is a tile. With atomic adds it takes five matmuls, and in the two passes it takes four and three. A mark × 4 means that 4 workers add at the same time. At the right is one entry of each block of dQ, summed in float32 in the order of this run.";
if (ask.has("step")) transport.go(Number(ask.get("step")));
onWidth(stage, () => transport.show());
