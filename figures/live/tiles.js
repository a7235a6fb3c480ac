/* The tile playground: sizes in, traffic, memory on chip, programs and waves out. Numbers are from states.js, and the
   registers of tiles that were compiled are from the record in data.js. */
"use strict";

const { chips, compiled } = window.LIVE;
const set = { GPU: "H200", N: 8192, d: 128, B_r: 128, B_c: 64, heads: 16, warps: 8, stages: 2, causal: false };
const form = $("settings");
const powers = (low, high) => upTo(high + 1).slice(low).map((n) => 2 ** n);
const EDGES = [16, 32, 48, 64, 96, 128, 192, 256];

const FIRST = { ...set };
const TRIES = {
  "a tile that fits": {},
  "too large a tile": { B_r: 128, B_c: 256, d: 256, warps: 8 },
  "an empty last wave": { N: 1024, heads: 17 },
};

$("begin").innerHTML = [
  `<fieldset class="tries"><legend>begin with</legend>${Object.keys(TRIES).map((x) => `<button type="button">${x}</button>`).join("")}</fieldset>`,
  `<label class="field"><span>GPU</span><select name="GPU">${Object.keys(chips)
    .map((x) => `<option>${x}</option>`)
    .join("")}</select></label>`,
].join("");
$("of-tile").innerHTML = [
  slider("d", "d", [16, 32, 64, 80, 96, 128, 192, 256]),
  slider("B_r", "B<sub>r</sub> queries", EDGES),
  slider("B_c", "B<sub>c</sub> keys", EDGES),
  choice("warps", "warps", [["4"], ["8"]]),
  choice("stages of k, v", "stages", [["1"], ["2"], ["3"]]),
].join("");
$("of-problem").innerHTML = [
  slider("N", "N", powers(7, 20)),
  slider("heads", "batch × heads", upTo(257).slice(1)),
  choice("mask", "causal", [["true", "causal"]], "checkbox"),
].join("");

/** [registers, spill instructions] of the kernel with this tile, if it was compiled for such a GPU. */
const recorded = () => compiled[set.GPU]?.[[set.d, set.B_r, set.B_c, set.warps, set.stages].join(" ")];

const same = (a, b) => Object.keys(a).every((name) => String(a[name]) === String(b[name]));
const NAMES = { standard: "Standard", fa1: "FA1", fa2: "FA2" };

/** A quantity with the largest unit of which it has one: 26.7 s, 4.3 GB. */
function measured(x, units) {
  const [unit, one] = units.find(([, size]) => x >= size) || units.at(-1);
  return `${Number((x / one).toPrecision(3)).toLocaleString("en")} ${unit}`;
}
const bytes = (x) => measured(x, [["PB", 1e15], ["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]); // prettier-ignore
const seconds = (x) => measured(x, [["min", 60], ["s", 1], ["ms", 1e-3], ["µs", 1e-6]]); // prettier-ignore
const kib = (x) => `${(x / KiB).toFixed(x % KiB ? 1 : 0)} KiB`;

/** A bar with its name and number; `parts` are [share, class]. */
function row(name, parts, text, className = "") {
  const e = make("div", `row ${className}`, make("span", "", name), make("div", "track"), make("span", "", text));
  for (const [share, look] of parts) add(e.children[1], look, "i").style.width = `${Math.min(100, 100 * share)}%`;
  return e;
}

// The picture: a window of the square of scores, with a tile, its queries and its keys to scale -----------------------

const stage = $("stage");
let corner = null; // where the tile begins, and pixels for each number, while a finger or the mouse can drag its corner

/** Numbers from 0 to N that the window shows of one side. */
const shown = (N, least, B) => Math.min(N, Math.max(least, 2 * B));

function drawTile() {
  if (!stage.clientWidth) return; // not laid out yet
  const { N, d, B_r, B_c, stages, causal } = set;
  const narrow = matchMedia("(max-width: 599px)").matches;
  const tall = matchMedia("(min-width: 700px) and (max-width: 1099px)").matches; // as high as the panels beside it
  const [wide, high] = [shown(N, 512, B_c), narrow ? Math.min(N, Math.max(256, B_r)) : shown(N, tall ? 960 : 512, B_r)];
  const unit = (stage.clientWidth - 50) / (Math.max(512, 2 * B_c, 2 * B_r) + Math.max(128, d)); // N alone does not change the scale
  const [strip, w, h] = [d * unit, wide * unit, high * unit];
  const [x, y] = [Math.max(128, d) * unit + 38, strip + 32];
  clear(stage, y + h + 12);
  corner = { x, y, unit };
  const box = (left, top, width, height, look, parent = stage) => shape(parent, "rect", { x: left, y: top, width, height, class: look });
  const text = (left, top, words, look = "small") => shape(stage, "text", { x: left, y: top, class: look }, words);

  box(x - strip - 8, y, strip, h, "strip Q");
  box(x + 5, y - strip - 13, w, strip, "strip V");
  box(x, y - strip - 8, w, strip, "strip K");
  box(x, y, w, h, "square");
  const [rows, columns] = [Math.min(B_r, N), Math.min(B_c, N)]; // no tile is larger than the square
  const work = Math.min(keysLoaded(0, { N_q: N, N_k: N, B_r, B_c, causal }), wide);
  box(x, y, work * unit, rows * unit, "work");
  drawGrid({ x, y, w, h, unit, wide, high });
  if (causal) drawHidden({ x, y, unit, wide, high });
  box(x - strip - 8, y, strip, rows * unit, "held Q");
  for (const k of upTo(stages).reverse()) {
    const width = Math.min(columns, wide - k * columns) * unit;
    if (width <= 0) continue;
    box(x + k * columns * unit + 5, y - strip - 13, width, strip, `held V${k ? " later" : ""}`);
    box(x + k * columns * unit, y - strip - 8, width, strip, `held K${k ? " later" : ""}`);
  }
  box(x, y, columns * unit, rows * unit, "held S tile-of");
  names();
  if (N > wide || N > high) drawWhole({ x: x + w, y: y + h, wide, high });
  const handle = shape(stage, "circle", { cx: x + columns * unit + 4, cy: y + rows * unit + 4, r: 7, class: "corner" });
  handle.onpointerdown = drag;
  const part = N > high ? `The window shows ${grouped(high)} × ${grouped(wide)} of the ${grouped(N)} × ${grouped(N)} scores.` : `The square has ${grouped(N)} × ${grouped(N)} scores.`;
  const visits = visited(0, { N_q: N, N_k: N, B_r, B_c, causal });
  const words = `${part} One tile of ${rows} × ${columns} is on the chip, and the thread block of these queries computes ${grouped(visits)} ${visits === 1 ? "tile" : "tiles"}.`;
  stage.setAttribute("aria-label", words);
  $("picture-note").textContent = `${words} All lengths have one scale.`;

  function names() {
    const [tall, broad] = [rows * unit, columns * unit];
    if (strip > 18 && tall > 16) text(x - strip / 2 - 8, y + tall / 2 + 5, "q", "middle strong in");
    if (strip > 18 && broad > 32) text(x + broad / 2, y - strip / 2 - 3, "k, v", "middle strong in");
    const sized = broad > 62 && tall > 40;
    if (broad > 12 && tall > 16) text(x + broad / 2, y + tall / 2 + (sized ? -3 : 5), "s", "middle strong in");
    if (sized) text(x + broad / 2, y + tall / 2 + 14, `${rows} × ${columns}`, "small middle in");
    text(x + w, y - strip - 19, N > wide ? `K and V: ${grouped(N)} keys →` : `K and V: ${grouped(N)} keys`, "small end");
    const left = x - strip - 16;
    shape(stage, "text", { x: left, y: y + h, class: "small", transform: `rotate(-90 ${left} ${y + h})` }, N > high ? `← Q: ${grouped(N)} queries` : `Q: ${grouped(N)} queries`);
  }
}

/** The edges of all tiles in the window, if they are far enough apart to be seen. */
function drawGrid({ x, y, w, h, unit, wide, high }) {
  const cuts = (n, B) => (B * unit < 5 ? [] : upTo(cdiv(n, B)).slice(1).map((k) => k * B * unit)); // prettier-ignore
  const lines = [...cuts(wide, set.B_c).map((at) => `M${x + at} ${y}v${h}`), ...cuts(high, set.B_r).map((at) => `M${x} ${y + at}h${w}`)];
  shape(stage, "path", { d: lines.join(""), class: "cuts" });
}

/** With a causal mask, the tiles of the window that no thread block computes. */
function drawHidden({ x, y, unit, wide, high }) {
  const tiling = { N_q: set.N, N_k: set.N, B_r: set.B_r, B_c: set.B_c, causal: true };
  for (const i of upTo(cdiv(high, set.B_r))) {
    const [from, top] = [keysLoaded(i, tiling), i * set.B_r];
    const at = { x: x + from * unit, y: y + top * unit, height: Math.min(set.B_r, high - top) * unit };
    if (from < wide) shape(stage, "rect", { ...at, width: (wide - from) * unit, class: "hidden-tiles" });
    if (!i && (wide - from) * unit > 90) shape(stage, "text", { x: x + wide * unit - 8, y: y + 18, class: "small end" }, "not computed");
  }
}

/** The whole square, small, and how much of it the window shows. */
function drawWhole({ x, y, wide, high }) {
  const side = 62;
  const at = { x: x - side - 10, y: y - side - 10 };
  shape(stage, "rect", { x: at.x - 8, y: at.y - 24, width: side + 18, height: side + 34, class: "paper" });
  shape(stage, "rect", { ...at, width: side, height: side, class: "square" });
  const part = (n) => Math.max(2, (side * n) / set.N);
  shape(stage, "rect", { ...at, width: part(wide), height: part(high), class: "seen-part" });
  shape(stage, "text", { x: at.x + side / 2, y: at.y - 8, class: "small middle" }, "all of it");
}

/** The corner follows the pointer, to the tile that comes nearest. */
function drag(e) {
  e.preventDefault();
  stage.setPointerCapture(e.pointerId); // the corner itself is drawn again
  const near = (name, want) => {
    const field = form.elements[name];
    const values = field.dataset.values.split(",").map(Number);
    field.value = values.reduce((best, x, k) => (Math.abs(x - want) < Math.abs(values[best] - want) ? k : best), 0);
  };
  const { x, y, unit } = corner; // of the tile as it was: its scale does not jump under the pointer
  const move = ({ clientX, clientY }) => {
    const { left, top } = stage.getBoundingClientRect();
    near("B_c", (clientX - left - x) / unit);
    near("B_r", (clientY - top - y) / unit);
    form.oninput();
  };
  const stop = () => ["pointermove", "pointerup", "pointercancel"].forEach((name, k) => removeEventListener(name, [move, stop, stop][k]));
  addEventListener("pointermove", move);
  addEventListener("pointerup", stop);
  addEventListener("pointercancel", stop);
}

/** A bar of parts against a limit, which is a line at a fixed place; an arrow says that the parts go on beyond the bar. */
function gauge(parts, limit, used, said) {
  const most = limit / 0.7;
  let rest = most;
  const e = make("div", "gauge");
  for (const [name, size, hue] of parts) {
    const x = Math.min(size, rest);
    rest -= x;
    const part = add(e, hue, "i", x / most > 0.2 ? name : x / most > 0.04 ? name.split(" ")[0] : "");
    part.style.width = `${(100 * x) / most}%`;
  }
  add(e, "limit", "b").style.left = `${(100 * limit) / most}%`;
  if (used < 0.6 * limit) add(e, "most", "small", `at most ${said}`).style.right = `${102 - (100 * limit) / most}%`;
  e.classList.toggle("over", used > limit);
  e.classList.toggle("torn", used > most);
  return e;
}

function draw() {
  const chip = chips[set.GPU];
  form.classList.add("stale");
  const found = plan(chip, set, recorded());
  form.classList.remove("stale");
  $("refused").textContent = misfit(found, chip);
  drawTile();
  drawTraffic(found, chip);
  drawMemory(found, chip);
  drawWaves(found, chip);
  write($("say"), verdict(found));
  for (const e of form.querySelectorAll(".tries button")) e.setAttribute("aria-pressed", same(set, { ...FIRST, ...TRIES[e.textContent] }));
}

function misfit({ ok, scarce, over, limit, registers }, chip) {
  if (ok) return "";
  if (scarce === "shared memory")
    return `This tile does not fit: a thread block can have ${kib(chip.shared_per_block)} of shared memory, and it needs ${kib(over)} more.`;
  if (recorded())
    return `The compiler takes all ${limit} registers that a thread can have. The rest spills to memory, with ${grouped(over)} more instructions.`;
  return `By our sum, this tile needs about ${registers} registers per thread. That is ${over} more than the ${limit} to be had, so they spill to memory.`;
}

/** What matters most: a tile that does not fit, a last wave that leaves much of the GPU idle, or else that the tile fits. */
function verdict({ ok, scarce, programs, slots, waves, busy }) {
  if (!ok && scarce !== "registers") return "<b>This tile does not fit, so it cannot run here.</b>";
  if (!ok) return `<b>This tile runs, but ${recorded() ? "when compiled" : "by our sum"}, its registers spill.</b>`;
  const fits = recorded() ? "This tile fits, and when compiled, nothing spills." : "By our sum, this tile fits.";
  if (waves < 2 || busy > 0.75) return `<b>${fits}</b>`;
  const last = programs - (waves - 1) * slots;
  const idle = `Wave ${waves} has only ${last} thread ${last === 1 ? "block" : "blocks"} for ${slots} slots`;
  return `<b>${idle}, so on average, ${percent(1 - busy)} of the slots are idle.</b> ${fits}`;
}

function drawTraffic({ moved, flops }, chip) {
  const most = Math.max(...Object.values(moved).map(({ requested }) => requested));
  const rows = Object.entries(moved).map(([name, { requested, dram }]) => {
    const parts = [[requested / most, "outline"], [dram / most, "fill"]]; // prettier-ignore
    const e = row(NAMES[name], parts, bytes(requested), name === "fa2" ? "now" : "");
    add(e, "", "span", bytes(dram));
    return e;
  });
  const head = row("", [], "□ requested");
  add(head, "", "span", "■ from DRAM");
  $("traffic").replaceChildren(head, ...rows);
  const ratio = moved.standard.requested / moved.fa2.requested;
  $("traffic-ratio").textContent = `standard requests ${ratio.toFixed(ratio < 10 ? 1 : 0)} × FA2’s bytes`;
  const times = Object.entries(moved).map(([name, { dram }]) => `${NAMES[name]} ${seconds(dram / chip.hbm_bytes_per_second)}`);
  $("traffic-note").textContent =
    `An outline shows the bytes that the chip requests, and its fill those that reach DRAM, because L2 does not have them (a model). For that, DRAM needs these times: ${times.join(", ")}. The two matmuls need ${seconds(flops / chip.tensor_flops_per_second)} of the tensor cores.`;
}

/** Beside the title of a bar, how much is to spare, or by how much it is too much. */
function room(place, used, limit, unit) {
  const left = limit - used;
  place.textContent = `${unit(Math.abs(left))} ${left < 0 ? "too much" : "to spare"}`;
  place.classList.toggle("over", left < 0);
}

function drawMemory({ parts, shared, counted, registers, spills, limit }, chip) {
  const tensors = Object.entries(parts).map(([name, x]) => [`${name} ${kib(x)}`, x, name.toUpperCase()]);
  $("shared").replaceChildren(gauge(tensors, chip.shared_per_block, shared, kib(chip.shared_per_block)));
  const each_tensor = tensors.map(([name]) => name).join(" + ");
  $("shared-note").textContent = `${each_tensor} = ${kib(shared)} per thread block, with k and v in every stage.`;
  room($("shared-room"), shared, chip.shared_per_block, kib);
  const threads = 32 * set.warps;
  const scores = (set.B_r * set.B_c) / threads;
  const each = [
    ["o", (set.B_r * set.d) / threads, "O"],
    ["s", scores, "S"],
    ["p", scores / 2, "P"],
    ["rest", FIXED_REGISTERS, "rest"],
    ["", Math.max(0, registers - counted), "more"],
  ];
  $("registers").replaceChildren(gauge(each, limit, spills ? Math.max(counted, limit + 1) : registers, `${limit}`));
  const what = "o and s in fp32, p in 2 bytes, and the rest for addresses, m and ℓ";
  const more = registers > counted ? ", and the hatched part is what the compiler takes besides" : "";
  $("registers-note").textContent = recorded()
    ? `The compiler takes ${registers} of ${limit} per thread (fp16, no mask)${spills ? ", and spills" : ""}. Our sum is about ${counted}: ${what}${more}.`
    : `This tile is not in our record of compiled kernels, so this is our sum: about ${counted} of ${limit} per thread. It has ${what}. A compiler can take more.`;
  room($("registers-room"), spills ? counted : registers, limit, String);
  if (registers > counted) $("registers-room").prepend("▨ temporary, ");
  if (spills && counted <= limit) $("registers-room").textContent = "none to spare, so they spill";
  $("registers-room").classList.toggle("over", spills > 0);
}

function drawWaves({ programs, perSM, by, slots, waves, busy, fa1Programs }, chip) {
  $("waves").replaceChildren();
  if (!slots) {
    $("per-sm").textContent = "";
    $("waves").textContent = $("waves-note").textContent = "No thread block of this size runs on this GPU.";
    return;
  }
  const last = programs - (waves - 1) * slots;
  const wave = (name, n) => $("waves").append(row(name, [[n / slots, "fill"]], `${n} of ${slots}`));
  if (waves > 2) wave(`waves 1–${grouped(waves - 1)}`, slots);
  if (waves === 2) wave("wave 1", slots);
  wave(`wave ${grouped(waves)}`, last);
  $("per-sm").textContent = `${perSM} per SM`;
  const blocks = (n) => `${grouped(n)} thread ${n === 1 ? "block" : "blocks"}`;
  const most = `Each of the ${chip.SMs} SMs runs ${blocks(perSM)} at a time (the limit is its ${by}), so ${grouped(slots)} run at once.`;
  const places = `${most} ${blocks(programs)} take ${grouped(waves)} ${waves === 1 ? "wave" : "waves"}, with ${percent(busy)} of the slots busy.`;
  $("waves-note").textContent =
    `${places} FA1 has ${fa1Programs} ${fa1Programs === 1 ? "thread block" : "thread blocks"}, one per head.`;
}

follow(form, set, draw);
for (const button of form.querySelectorAll(".tries button"))
  button.onclick = () => {
    mark(form, { ...FIRST, ...TRIES[button.textContent] });
    form.oninput();
  };
onWidth(stage, drawTile);
