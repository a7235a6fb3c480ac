/* The backward, block by block: all workers take one tile at a time, and dQ is where they meet. */
"use strict";

const set = { rows: 5, columns: 5, causal: false, passes: 1 };
const form = $("settings");
const stage = $("stage");
const LABELS = { rows: "row blocks", columns: "column blocks" };
let run = [];

form.innerHTML = [
  ...Object.entries(LABELS).map(([name, label]) => field(name, label, 'min="1" max="8"')),
  choice("mask", "causal", [["true", "causal"]], "checkbox"),
  choice("dQ", "passes", [["1", "one pass, atomic adds"], ["2", "two passes"]]),
].join(""); // prettier-ignore
const transport = new Transport($("transport"), { draw, dwell: () => 1300 });
const tiling = () => ({ N_q: set.rows, N_k: set.columns, B_r: 1, B_c: 1, causal: set.causal });

function prepare() {
  for (const name of Object.keys(LABELS)) whole(LABELS[name], set[name], 1, 8);
  run = backward(tiling(), set.passes);
  transport.length(run.length);
}

// Drawing -------------------------------------------------------------------------------------------------------------

function draw(t) {
  if (!stage.clientWidth || !run.length) return; // not laid out yet, or refused
  const step = run[t];
  const width = stage.clientWidth;
  const c = Math.min(64, Math.floor((width - 170) / set.columns), 330 / set.rows);
  const place = { c, x: 42, y: 58, dQ: 42 + set.columns * c + 18, dw: 46 };
  const height = place.y + set.rows * c + 10;
  clear(stage, height);
  const visits = visitsUntil(t);
  for (const i of upTo(set.rows)) for (const j of upTo(set.columns)) drawTile(step, i, j, place, visits);
  for (const j of upTo(set.columns)) drawColumn(step, j, place);
  for (const i of upTo(set.rows)) drawRow(step, i, place);
  write($("say"), sentence(step));
  stage.setAttribute("aria-label", `${set.rows} row blocks, ${set.columns} column blocks. ${sentence(step)}`);
  $("note").textContent = count(t);
}

/** How often each tile has been computed so far. */
function visitsUntil(t) {
  const visits = {};
  for (const step of run.slice(0, t + 1))
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
      String(here.worker + 1),
    );
}

/** dK and dV of a column block, above its tiles. */
function drawColumn(step, j, { c, x, y }) {
  const mine = step.pass === 1 && step.at.some((at) => at.j === j);
  shape(stage, "text", { x: x + (j + 0.5) * c, y: 14, class: "small middle" }, `${j + 1}`);
  for (const [k, hue] of [["K"], ["V"]].entries()) {
    const at = {
      x: x + j * c + 3,
      y: 20 + 16 * k,
      width: c - 6,
      height: 13,
      class: `gradient ${hue}${mine ? " on" : ""}`,
    };
    shape(stage, "rect", at);
    if (j === 0) shape(stage, "text", { x: x - 4, y: 31 + 16 * k, class: "small end" }, `d${hue[0]}`);
  }
}

/** dQ of a row block, right of its tiles: who adds into it now, and how often it has been added to. */
function drawRow(step, i, { c, x, y, dQ, dw }) {
  const writers = step.writers?.[i] || [];
  const meet = step.meet[i];
  const top = y + i * c;
  shape(stage, "text", { x: x - 6, y: top + c / 2 + 4, class: "small end" }, String(i + 1));
  if (i === 0) shape(stage, "text", { x: dQ + dw / 2, y: y - 8, class: "small middle" }, "dQ");
  const look = `gradient Q${writers.length ? " on" : ""}${meet ? " meet" : ""}`;
  shape(stage, "rect", { x: dQ, y: top + 3, width: dw, height: c - 6, class: look });
  shape(
    stage,
    "text",
    { x: dQ + dw / 2, y: top + c / 2 + 4, class: "small middle in" },
    step.added[i] ? `+${step.added[i]}` : "",
  );
  const said = meet ? `${meet.length} at once` : "";
  shape(stage, "text", { x: dQ + dw + 6, y: top + c / 2 + 4, class: "strong" }, said);
}

function sentence(step) {
  const meeting = Object.values(step.meet);
  const most = Math.max(0, ...meeting.map((workers) => workers.length));
  if (step.op === "start" && set.passes === 1)
    return "One worker for each column block. It keeps k, v, dK and dV on its chip, and goes down its column. Press play.";
  if (step.op === "start")
    return "Two passes: first the columns compute dK and dV, then the rows compute dQ. Press play.";
  if (step.op === "done" && set.passes === 1)
    return step.collisions
      ? `Done. ${step.collisions} additions found another worker in the same rows: they must be atomic, and their order is left to chance.`
      : "Done. No two workers were ever in the same rows.";
  if (step.op === "done")
    return "Done. Every block of dQ had one writer, so its sum has one order. The price: S and dP are computed twice.";
  if (step.pass === 2)
    return "Second pass: each row block has one worker, which computes S and dP again and keeps dQ on its chip.";
  if (set.passes === 2) return "First pass: dK and dV grow on chip. Nothing is added into dQ.";
  if (!most) return "Each worker adds its tile’s part into a dQ that is its own at this moment.";
  return `${meeting.length === 1 ? "One block" : `${meeting.length} blocks`} of dQ ${meeting.length === 1 ? "has" : "have"} several writers at once, up to ${most}. Without atomic adds one sum would overwrite the other.`;
}

function count(t) {
  const [step, all] = [run[t], run.at(-1)];
  const tiles = sum(all.added);
  return `${step.products} of ${all.products} products of tiles (${set.passes === 1 ? 5 : "4 + 3"} for each of ${tiles} tiles), ${sum(step.added)} of ${tiles} additions into dQ. All workers start together and take equally long for a tile.`;
}

follow(form, set, () => {
  transport.pause();
  prepare();
  transport.go(0);
});
if (ask.has("step")) transport.go(Number(ask.get("step")));
onWidth(stage, () => transport.show());
