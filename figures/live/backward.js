/* The backward, block by block: all workers take one tile at a time, and dQ is where they meet. */
"use strict";

const set = { rows: 5, columns: 5, causal: false, passes: 1 };
const form = $("settings");
const stage = $("stage");
const LABELS = { rows: "row blocks", columns: "column blocks" };
const WAYS = ["one pass", "two passes"];
const LEADS = [
  "Each worker goes down a column and keeps its dK and dV. Press Next and watch who adds to dQ. Then choose two passes.",
  "In pass 1, each worker goes down a column and keeps its dK and dV. In pass 2, each worker goes along a row and keeps its dQ.",
];
let run = [];
let both = []; // the runs of both ways

form.innerHTML = [
  ...Object.entries(LABELS).map(([name, label]) => slider(name, label, upTo(8).map((n) => n + 1))),
  choice("mask", "causal", [["true", "causal"]], "checkbox"),
  choice("dQ", "passes", [["1", "one pass, atomic adds"], ["2", "two passes"]]),
].join(""); // prettier-ignore
const transport = new Transport($("transport"), { draw, dwell: () => 1300 });
const tiling = () => ({ N_q: set.rows, N_k: set.columns, B_r: 1, B_c: 1, causal: set.causal });

function prepare() {
  for (const name of Object.keys(LABELS)) whole(LABELS[name], set[name], 1, 8);
  both = [1, 2].map((passes) => backward(tiling(), passes));
  run = both[set.passes - 1];
  write($("lead"), LEADS[set.passes - 1]);
  transport.length(run.length);
}

/** The step that is shown first: the gradients have begun to grow, and if workers meet at all, they do so here. */
function opening() {
  const grown = run.findIndex(({ meet }, t) => t >= 3 && Object.keys(meet).length);
  return grown < 0 ? Math.min(3, transport.last - 1) : grown;
}

/** The pass that a step belongs to; the start is drawn with the first one, and the end with the last one. */
const passOf = ({ op, pass }) => pass || (op === "done" ? set.passes : 1);

// Drawing -------------------------------------------------------------------------------------------------------------

function draw(t) {
  if (!stage.clientWidth || !run.length) return; // not laid out yet, or refused
  const step = run[t];
  const width = stage.clientWidth;
  const narrow = width < 480;
  const [x, gap, dw, meet] = narrow ? [44, 10, 34, 40] : [60, 18, 52, 88];
  const c = Math.min(72, Math.floor((width - x - gap - dw - meet) / set.columns), 360 / set.rows);
  const place = { c, x, y: 76, dQ: x + set.columns * c + gap, dw, narrow };
  const height = place.y + set.rows * c + 10;
  clear(stage, height);
  const visits = visitsUntil(t);
  for (const i of upTo(set.rows)) for (const j of upTo(set.columns)) drawTile(step, i, j, place, visits);
  for (const j of upTo(set.columns)) drawColumn(t, j, place);
  for (const i of upTo(set.rows)) drawRow(step, i, place);
  drawNames(passOf(step), width, place);
  if (step.op === "done") drawDone(place);
  $("both").replaceChildren(...counts(t));
  write($("say"), sentence(step));
  stage.setAttribute("aria-label", `${set.rows} row blocks, ${set.columns} column blocks. ${sentence(step)}`);
}

/** Over the tiles, that all of them are computed. */
function drawDone({ c, x, y }) {
  const at = { x: x + (set.columns * c) / 2, y: y + (set.rows * c) / 2 };
  shape(stage, "rect", { x: at.x - 44, y: at.y - 21, width: 88, height: 42, rx: 21, class: "done-mark" });
  shape(stage, "text", { x: at.x, y: at.y + 6, class: "middle strong" }, "✓ done");
}

/** What the numbers beside the tiles count, and which pass this is: the workers share out the columns in the first
    pass, and the rows in the second. */
function drawNames(pass, width, { c, x, y, dQ, dw }) {
  const middle = y + (set.rows * c) / 2;
  const [across, down] = [width - x - (set.passes === 2 ? 90 : 0), set.rows * c];
  const columns = pass === 1 && across > 230 ? "column blocks, each with its worker" : "column blocks";
  const rows = pass === 2 && down > 200 ? "row blocks, each with its worker" : "row blocks";
  shape(stage, "text", { x, y: 12, class: "small quiet" }, columns);
  const end = Math.min(width, Math.max(dQ + dw, x + 320));
  if (set.passes === 2) shape(stage, "text", { x: end, y: 12, class: "small strong end" }, `pass ${pass} of 2`);
  const turned = { x: 12, y: middle, transform: `rotate(-90 12 ${middle})`, class: "small middle quiet" };
  shape(stage, "text", turned, rows);
}

/** How often each tile has been computed so far, in the pass that runs. */
function visitsUntil(t) {
  const visits = {};
  for (const step of run.slice(0, t + 1).filter((step) => passOf(step) === passOf(run[t])))
    for (const { i, j } of step.at) visits[`${i} ${j}`] = (visits[`${i} ${j}`] || 0) + 1;
  return visits;
}

function drawTile(step, i, j, { c, x, y }, visits) {
  const skip = j >= visited(i, tiling());
  const here = step.at.find((at) => at.i === i && at.j === j);
  const seen = visits[`${i} ${j}`] || 0;
  const look = skip ? "tile skip" : here ? "tile now" : seen ? "tile seen" : "tile";
  shape(stage, "rect", { x: x + j * c + 1, y: y + i * c + 1, width: c - 2, height: c - 2, class: look });
  if (here)
    shape(
      stage,
      "text",
      { x: x + (j + 0.5) * c, y: y + (i + 0.5) * c + 5, class: "middle in" },
      c > 64 ? `worker ${here.worker + 1}` : String(here.worker + 1),
    );
}

/** A gradient that grows with its tiles: dashed until the last one, then whole. */
function drawGradient(hue, share, look, { x, y, width, height }) {
  const kind = `gradient ${hue}${share === 1 ? " whole" : ""}${look}`;
  shape(stage, "rect", { x, y, width: width * share, height, class: `sum ${hue}` });
  shape(stage, "rect", { x, y, width, height, class: kind });
}

/** dK and dV of a column block, above its tiles. */
function drawColumn(t, j, { c, x }) {
  shape(stage, "text", { x: x + (j + 0.5) * c, y: 32, class: "small middle" }, `${j + 1}`);
  const added = (steps) => sum(steps.map(({ pass, at }) => (pass === 1 ? at.filter((tile) => tile.j === j).length : 0)));
  const share = added(run.slice(0, t + 1)) / (added(run) || 1);
  for (const [k, hue] of ["K", "V"].entries()) {
    drawGradient(hue, share, "", { x: x + j * c + 3, y: 38 + 16 * k, width: c - 6, height: 13 });
    if (j === 0) shape(stage, "text", { x: x - 4, y: 49 + 16 * k, class: "small end" }, `d${hue}`);
  }
}

/** dQ of a row block, right of its tiles: who adds to it now, and how often it has been added to. */
function drawRow(step, i, { c, x, y, dQ, dw, narrow }) {
  const meet = step.meet[i];
  const top = y + i * c;
  shape(stage, "text", { x: x - 6, y: top + c / 2 + 4, class: "small end" }, String(i + 1));
  if (i === 0) shape(stage, "text", { x: dQ + dw / 2, y: y - 8, class: "small middle" }, "dQ");
  const share = step.added[i] / (run.at(-1).added[i] || 1);
  drawGradient("Q", share, meet ? " meet" : "", { x: dQ, y: top + 3, width: dw, height: c - 6 });
  shape(
    stage,
    "text",
    { x: dQ + dw / 2, y: top + c / 2 + 4, class: "small middle in" },
    !step.added[i] ? "" : narrow ? String(step.added[i]) : `${step.added[i]} add${step.added[i] > 1 ? "s" : ""}`,
  );
  if (!meet) return;
  for (const [k, text] of (narrow ? [`${meet.length} at`, "once"] : [`${meet.length} at once`]).entries())
    shape(stage, "text", { x: dQ + dw + 6, y: top + c / 2 + (narrow ? -4 : 4) + 16 * k, class: narrow ? "small strong" : "strong" }, text);
}

const names = (numbers) => `${numbers.slice(0, -1).join(", ")}${numbers.length > 1 ? " and " : ""}${numbers.at(-1)}`;
const several = (word, numbers) => `${word}${numbers.length > 1 ? "s" : ""} ${names(numbers)}`;

function sentence(step) {
  if (step.op === "start" && set.passes === 1)
    return "One worker for each column block. It keeps k, v, dK and dV on its chip, and goes down its column. Press play.";
  if (step.op === "start")
    return "Two passes: first the columns compute dK and dV, then the rows compute dQ. Press play.";
  if (step.op === "done" && set.passes === 1)
    return step.collisions
      ? `Done, all gradients are in HBM. ${step.collisions} additions found another worker in the same block of dQ, so they must be atomic, and their order is left to chance.`
      : "Done, all gradients are in HBM. No two workers were ever in the same block of dQ.";
  if (step.op === "done")
    return "Done, all gradients are in HBM. Every block of dQ had one writer, so its sum has one order. In exchange, S and dP are computed twice.";
  const pass = set.passes === 2 ? `Pass ${step.pass} of 2.` : "";
  return [pass, where(step), finished(step)].filter(Boolean).join(" ");
}

/** Where the workers are, and what becomes of their parts of dQ. */
function where({ pass, at, meet }) {
  const all = at.length === (pass === 1 ? set.columns : set.rows) && at.length > 2;
  const workers = all ? `All ${at.length} workers` : several("Worker", at.map(({ worker }) => worker + 1)); // prettier-ignore
  const verb = at.length > 1 ? "are" : "is";
  if (pass === 2) {
    const columns = [...new Set(at.map(({ j }) => j + 1))];
    return `${workers} ${verb} at ${several("column block", columns)}, each with a row block of its own. S and dP are computed again, and dQ grows on chip.`;
  }
  const blocks = [...new Set(at.map(({ i }) => i + 1))];
  const here = `${workers} ${verb} at ${several("row block", blocks)}.`;
  if (set.passes === 2) return `${here} dK and dV grow on chip, and nothing is added into dQ.`;
  const met = Object.keys(meet).map((i) => Number(i) + 1);
  if (!met.length) return `${here} Each adds its part into a block of dQ that no other worker uses now.`;
  const most = Math.max(...Object.values(meet).map((x) => x.length));
  return `${here} ${several("Block", met)} of dQ ${met.length > 1 ? "have up to" : "has"} ${most} writers at once. Without atomic adds, one sum would overwrite the other.`;
}

/** Which gradients this step completes. */
function finished(step) {
  const next = run.slice(run.indexOf(step) + 1).filter(({ pass }) => pass === step.pass);
  const left = (name) => new Set(next.flatMap(({ at }) => at.map((tile) => tile[name])));
  const over = (name) => [...new Set(step.at.map((tile) => tile[name]))].filter((n) => !left(name).has(n));
  const name = step.pass === 1 ? "j" : "i";
  const done = over(name).map((n) => n + 1);
  if (!done.length) return "";
  return `${name === "j" ? "dK and dV" : "dQ"} of ${several(name === "j" ? "column" : "row", done)} ${name === "j" || done.length > 1 ? "are" : "is"} finished and stored.`;
}

/** What both ways take, side by side, and how far the one that is shown has come. */
function counts(t) {
  const rows = both[0].at(-1).added.length;
  const tiles = sum(both[0].at(-1).added);
  const time = (way) => sum(both[way].map(({ pass }) => [0, way ? 4 : 5, 3][pass])); // a tile of each worker per step
  const writers = (way) => Math.max(1, ...both[way].flatMap(({ meet }) => Object.values(meet).map(({ length }) => length)));
  const lines = [
    ["matmuls per tile", "5", "4 + 3"],
    ["matmuls", ...both.map((way) => grouped(way.at(-1).products))],
    ["time, in matmuls", time(0), time(1)],
    ["atomic adds to dQ", tiles, 0],
    ["stores of dQ blocks", 0, rows],
    ["writers of a block at once", writers(0), writers(1)],
  ];
  const table = make("table", "", make("thead", "", make("tr", "", make("td"), ...WAYS.map((name) => make("th", "", name)))), make("tbody"));
  for (const [name, ...numbers] of lines)
    table.tBodies[0].append(make("tr", "", make("th", "", name), ...numbers.map((x) => make("td", "", String(x)))));
  for (const { cells } of table.rows) cells[set.passes].classList.add("now");
  const most = Math.max(1, ...both.map((way) => way.at(-1).products));
  const bars = both.map((way, k) => {
    const [all, now] = [way.at(-1).products, k === set.passes - 1 ? run[t].products : 0];
    const e = make("div", `row${now || k === set.passes - 1 ? " now" : ""}`, make("span", "", WAYS[k]), make("div", "track"));
    add(e.children[1], "outline", "i").style.width = `${(100 * all) / most}%`;
    add(e.children[1], "fill", "i").style.width = `${(100 * now) / most}%`;
    e.append(make("span", "", k === set.passes - 1 ? `${now} of ${all}` : String(all)));
    return e;
  });
  return [table, make("p", "note", "Matmuls so far"), ...bars];
}

$("note").textContent =
  "A fill grows with every tile that is added, and the edge is dashed until the gradient is complete. The number in a block of dQ counts the parts that have been added to it. All workers start together and take the same time for a tile.";
follow(form, set, () => {
  transport.pause();
  prepare();
  transport.go(opening());
});
if (ask.has("step")) transport.go(Number(ask.get("step")));
onWidth(stage, () => transport.show());
