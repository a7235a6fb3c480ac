/* The backward, block by block, in both ways: all workers take one tile at a time, and dQ is where they may meet. */
"use strict";

const set = { blocks: 5, causal: false };
const form = $("settings");
const WAYS = ["One pass", "Two passes"];
let moments = []; // the times, in ms, at which a way ends a step

form.innerHTML = [
  slider("blocks", "row and key blocks", upTo(8).map((n) => n + 1)),
  choice("mask", "causal", [["true", "causal"]], "checkbox"),
].join(""); // prettier-ignore
const boards = WAYS.map((name, k) => {
  const e = add($("boards"), "board", "section");
  add(e, "", "h2", name);
  const say = add(e, "say", "p");
  say.setAttribute("aria-live", "polite");
  return { passes: k + 1, run: [], say, stage: shape(e, "svg", { role: "img" }) };
});
const transport = new Transport($("transport"), { draw, dwell: () => 1300 });
const tiling = () => ({ N_q: set.blocks, N_k: set.blocks, B_r: 1, B_c: 1, causal: set.causal });

function prepare() {
  whole("blocks", set.blocks, 1, 8);
  for (const board of boards) {
    let matmuls = 0; // of a worker, which has a tile per step
    const each = [0, 6 - board.passes, 3];
    const run = backward(tiling(), board.passes).map((step) => ({ ...step, matmuls: (matmuls += each[step.pass]) }));
    const ms = MEASURED[set.causal ? "causal" : "full"][board.passes - 1];
    board.run = run.map((step) => ({ ...step, time: (step.matmuls * ms) / matmuls }));
  }
  moments = [...new Set(boards.flatMap(({ run }) => run.map(({ time }) => time)))].sort((a, b) => a - b);
  transport.length(moments.length + 1); // at the end, both are done
}

/** The moment that is shown first: the second pass is at work, and if workers meet at all in one pass, they do so here. */
function opening() {
  const [{ run }, two] = boards;
  const second = two.run.find(({ pass }) => pass === 2).time;
  const met = run.find(({ time, meet }) => time >= second && Object.keys(meet).length);
  return moments.indexOf((met || run[Math.min(3, run.length - 2)]).time);
}

/** The steps that a board has ended at a moment. Its run is done as soon as the other one goes on. */
const stepsOf = ({ run }, t) =>
  t >= moments.length || moments[t] > run.at(-1).time ? run : run.slice(0, -1).filter(({ time }) => time <= moments[t]);

// Drawing -------------------------------------------------------------------------------------------------------------

function draw(t) {
  if (!boards[0].run.length) return; // refused
  for (const board of boards) if (board.stage.clientWidth) drawBoard(board, stepsOf(board, t));
  drawTime(t);
  $("both").replaceChildren(counts(t));
}

/** One time axis for both ways: a box is a step, in which each worker takes a tile. */
function drawTime(t) {
  const axis = $("axis");
  const [left, end, now] = [90, moments.at(-1), moments[Math.min(t, moments.length - 1)]];
  const unit = (axis.clientWidth - left - 56) / end;
  clear(axis, 86);
  boards.forEach(({ run }, k) => {
    const y = 16 + 24 * k;
    shape(axis, "text", { x: 0, y, class: "small strong" }, WAYS[k]);
    shape(axis, "text", { x: left + run.at(-1).time * unit + 6, y, class: "small strong" }, `${run.at(-1).time.toFixed(1)} ms`);
    run.slice(1, -1).forEach(({ time, pass }, n) => {
      const kind = pass === 2 || k === 0 ? " Q" : "";
      const box = { x: left + run[n].time * unit, y: y - 14, width: Math.max(0, (time - run[n].time) * unit - 1), height: 20 };
      shape(axis, "rect", { ...box, class: `visit${kind}${time > now ? " ahead" : ""}` });
    });
    for (const p of k ? [1, 2] : [1]) {
      const [first, ...rest] = run.filter(({ pass }) => pass === p);
      const [from, to] = [run[run.indexOf(first) - 1].time, [first, ...rest].at(-1).time];
      const name = [["dK, dV and dQ"], ["dK, dV", "dQ"]][k][p - 1];
      shape(axis, "text", { x: left + from * unit + 6, y, class: `small in${from >= now ? " ahead" : ""}` }, name.length * 7 < (to - from) * unit ? name : "");
    }
  });
  shape(axis, "line", { x1: left + now * unit, x2: left + now * unit, y1: 0, y2: 52, class: "clock" });
  for (let x = 0; x <= end; x += 1)
    if (Math.abs(x - now) * unit > 22) shape(axis, "text", { x: left + x * unit, y: 66, class: "small middle" }, String(x));
  shape(axis, "text", { x: left + now * unit, y: 66, class: "small middle strong" }, now.toFixed(now ? 1 : 0));
  shape(axis, "text", { x: left, y: 82, class: "small" }, "measured time, in ms →");
}

function drawBoard(board, done) {
  const { passes, stage, say } = board;
  const step = done.at(-1);
  const small = stage.clientWidth < 300; // on a phone, both boards are beside each other
  const [x, gap, dw, right] = small ? [24, 8, 16, 12] : [52, 16, 52, 88];
  const c = Math.min(64, Math.floor((stage.clientWidth - x - gap - dw - right) / set.blocks), 280 / set.blocks);
  const place = { stage, c, x, y: 76, dQ: x + set.blocks * c + gap, dw, small };
  clear(stage, place.y + set.blocks * c + 6);
  for (const i of upTo(set.blocks)) for (const j of upTo(set.blocks)) drawTile(step, done, i, j, place);
  if (passes === 1 || step.pass === 2) for (const i of upTo(set.blocks)) drawAdds(step, i, place);
  for (const j of upTo(set.blocks)) drawColumn(board, done, j, place);
  for (const i of upTo(set.blocks)) drawRow(board, step, i, place);
  drawNames(passes, step, place);
  write(say, sentence(passes, step));
  stage.setAttribute("aria-label", `${set.blocks} row blocks and ${set.blocks} key blocks. ${sentence(passes, step)}`);
}

/** What the numbers beside the tiles count, and which pass this is; on a phone, how many workers write a block of dQ. */
function drawNames(passes, { op, pass, at, meet }, { stage, c, x, y, dQ, dw, small }) {
  const middle = y + (set.blocks * c) / 2;
  const writers = small && passes === 1 ? most(meet) || (at.length ? 1 : 0) : small && pass === 2 ? 1 : 0;
  const now = op === "done" ? "✓ done" : writers ? atOnce(writers) : passes === 2 && pass ? `pass ${pass}${small ? "" : " of 2"}` : "";
  shape(stage, "text", { x, y: 12, class: "small quiet" }, small ? "keys" : "key blocks");
  shape(stage, "text", { x: dQ + dw + (small ? 12 : 0), y: 12, class: "small strong end" }, now);
  if (!small) shape(stage, "text", { x: 12, y: middle, transform: `rotate(-90 12 ${middle})`, class: "small middle quiet" }, "row blocks");
}

/** The most workers that meet in one block of dQ. */
const most = (meet) => Math.max(0, ...Object.values(meet).map(({ length }) => length));
const atOnce = (n) => (n > 1 ? `${n} at once` : "1 writer");

/** A tile keeps a fill for each time that it has been computed, and shows the worker that computes it now. */
function drawTile(step, done, i, j, { stage, c, x, y }) {
  const computed = ({ at }) => at.find((tile) => tile.i === i && tile.j === j);
  const [here, times] = [computed(step), done.filter(computed).length];
  const look = j >= visited(i, tiling()) ? "skip" : here ? "now" : ["", "seen", "seen twice"][times];
  shape(stage, "rect", { x: x + j * c + 1, y: y + i * c + 1, width: c - 2, height: c - 2, class: `tile ${look}` });
  const at = { x: x + (j + 0.5) * c, y: y + (i + 0.5) * c + 5, class: "middle in" };
  if (here) shape(stage, "text", at, `${c > 64 ? "worker " : ""}${here.worker + 1}`);
}

/** A line for each worker that adds to dQ of a row block now, from the tiles to that block. */
function drawAdds({ at }, i, { stage, c, x, y, dQ }) {
  const now = at.filter((tile) => tile.i === i);
  const from = x + (Math.max(...now.map(({ j }) => j)) + 1) * c;
  now.forEach((_, k) => {
    const height = y + (i + (k + 1) / (now.length + 1)) * c;
    shape(stage, "line", { x1: from, x2: dQ, y1: height, y2: height, class: "adds Q" });
  });
}

/** A gradient that grows with its tiles: dashed until the last one, then whole. */
function drawGradient(hue, share, look, { stage, x, y, width, height }) {
  const kind = `gradient ${hue}${share === 1 ? " whole" : ""}${look}`;
  shape(stage, "rect", { x, y, width: width * share, height, class: `sum ${hue}` });
  shape(stage, "rect", { x, y, width, height, class: kind });
}

/** dK and dV of a column block, above its tiles. */
function drawColumn({ run }, done, j, { stage, c, x }) {
  shape(stage, "text", { x: x + (j + 0.5) * c, y: 32, class: "small middle" }, `${j + 1}`);
  const added = (steps) => sum(steps.map(({ pass, at }) => (pass === 1 ? at.filter((tile) => tile.j === j).length : 0)));
  const share = added(done) / (added(run) || 1);
  for (const [k, hue] of ["K", "V"].entries()) {
    drawGradient(hue, share, "", { stage, x: x + j * c + 3, y: 38 + 16 * k, width: c - 6, height: 13 });
    if (j === 0) shape(stage, "text", { x: x - 4, y: 49 + 16 * k, class: "small end" }, `d${hue}`);
  }
}

/** dQ of a row block, right of its tiles: how often it has been added to, and how many workers do so now. */
function drawRow({ run, passes }, step, i, { stage, c, x, y, dQ, dw, small }) {
  const [meet, added, all] = [step.meet[i], step.added[i], run.at(-1).added[i]];
  const top = y + i * c;
  shape(stage, "text", { x: x - 6, y: top + c / 2 + 4, class: "small end" }, String(i + 1));
  if (i === 0) shape(stage, "text", { x: dQ + dw / 2, y: y - 8, class: "small middle" }, "dQ");
  drawGradient("Q", added / (all || 1), meet ? " meet" : "", { stage, x: dQ, y: top + 3, width: dw, height: c - 6 });
  const words = !added ? "" : small ? String(added) : `${added} of ${all}`;
  shape(stage, "text", { x: dQ + (small ? dw + 9 : dw / 2), y: top + c / 2 + 4, class: "small middle in" }, words);
  const writes = (passes === 1 || step.pass === 2) && step.at.some((tile) => tile.i === i);
  if (writes && !small) shape(stage, "text", { x: dQ + dw + 6, y: top + c / 2 + 4, class: meet ? "strong" : "small quiet" }, atOnce(meet?.length || 1));
}

// What is said --------------------------------------------------------------------------------------------------------

const names = (numbers) => `${numbers.slice(0, -1).join(", ")}${numbers.length > 1 ? " and " : ""}${numbers.at(-1)}`;

/** One sentence for a step of one way. */
function sentence(passes, { op, pass, at, meet, added, collisions }) {
  const last = op === "done";
  if (passes === 2) {
    if (op === "start") return "Pass 1 computes dK and dV column by column, and pass 2 computes dQ row by row.";
    if (last) return "Every block of dQ had one writer, so its sum has one order, but S and dP were computed twice.";
    return pass === 1
      ? "In pass 1, dK and dV grow on the chip, but dQ does not."
      : "In pass 2, each worker keeps one block of dQ, and computes S and dP again.";
  }
  if (op === "start") return "Each worker keeps k, v, dK and dV of one column block on the chip, and goes down its column.";
  if (last)
    return collisions
      ? `In ${collisions} of ${sum(added)} adds, another worker was in the same block of dQ, so their order is left to chance.`
      : "No two workers were ever in the same block of dQ.";
  const met = Object.keys(meet).map((i) => Number(i) + 1);
  if (!met.length)
    return at.length > 1 ? "Each worker adds to a block of dQ that no other worker uses now." : "The last worker adds to a block of dQ.";
  const workers = most(meet);
  const blocks = `block${met.length > 1 ? "s" : ""} ${names(met)} of dQ`;
  return `${met.length > 1 ? "Up to" : workers === set.blocks ? "All" : "Now"} ${workers} workers add to ${blocks} at once, so the adds must be atomic.`;
}

/** What both ways have taken up to step t, and what they take in all. */
function counts(t) {
  const both = (count) => boards.map(({ run, passes }) => {
    const [now, all] = [stepsOf({ run }, t), run].map((steps) => count(steps, passes));
    return all ? `${grouped(now)} of ${grouped(all)}` : "none";
  }); // prettier-ignore
  const adds = (steps) => sum(steps.at(-1).added);
  const lines = [
    ["matmuls", ...both((steps) => steps.at(-1).products)],
    ["writes of dQ", ...both((steps, passes) => (passes === 1 ? adds(steps) : steps.at(-1).op === "done" ? set.blocks : 0))],
  ];
  lines[1][1] += " atomic adds";
  lines[1][2] += " stores";
  const head = make("tr", "", make("th", "", "until now"), ...WAYS.map((name) => make("th", "", name)));
  const table = make("table", "", make("thead", "", head), make("tbody"));
  for (const [name, ...numbers] of lines)
    table.tBodies[0].append(make("tr", "", make("th", "", name), ...numbers.map((x) => make("td", "", String(x)))));
  return table;
}

$("note").textContent =
  `The number on a tile is the worker that computes it, and the number in a block of dQ counts the parts that have been added to it. All workers start together. A tile takes five matmuls in one pass, and four and then three in two passes. Each way is as long as the simple kernels of chapter 09 took (${MEASURED.made}), and its matmuls share that time evenly.`;
follow(form, set, () => {
  transport.pause();
  prepare();
  transport.go(opening());
});
if (ask.has("step")) transport.go(Number(ask.get("step")));
onWidth($("boards"), () => transport.show());
