/* The tile playground: sizes in, traffic, memory on chip, programs and waves out. All numbers are from states.js. */
"use strict";

const { chips } = window.LIVE;
const set = { GPU: "H200", N: 8192, d: 128, B_r: 128, B_c: 64, heads: 16, warps: 8, stages: 2, causal: false };
const form = $("settings");
const LABELS = { N: "N (tokens)", d: "d", B_r: "B<sub>r</sub>", B_c: "B<sub>c</sub>", heads: "batch × heads" };

form.innerHTML = [
  `<label class="field"><span>GPU</span><select name="GPU">${Object.keys(chips)
    .map((x) => `<option>${x}</option>`)
    .join("")}</select></label>`,
  ...Object.entries(LABELS).map(([name, label]) => field(name, label, 'step="any" inputmode="numeric"')),
  choice("warps", "warps", [["4"], ["8"]]),
  choice("stages of k, v", "stages", [["1"], ["2"], ["3"]]),
  choice("mask", "causal", [["true", "causal"]], "checkbox"),
].join("");

const NAMES = { standard: "Standard", fa1: "FA1", fa2: "FA2" };
const bytes = (x) => {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (x >= size) return `${(x / size).toFixed(x >= 100 * size ? 0 : 1)} ${unit}`; // prettier-ignore
  return `${x} B`;
};
const kib = (x) => `${(x / KiB).toFixed(x % KiB ? 1 : 0)} KiB`;

/** A bar with its name and number; `parts` are [share, class]. */
function row(name, parts, text, className = "") {
  const e = make("div", `row ${className}`, make("span", "", name), make("div", "track"), make("span", "", text));
  for (const [share, look] of parts) add(e.children[1], look, "i").style.width = `${Math.min(100, 100 * share)}%`;
  return e;
}

/** A bar of parts against a limit, which is drawn as a line. */
function gauge(parts, limit, used) {
  const most = Math.max(limit, used) * 1.08;
  const e = make("div", "gauge");
  for (const [name, x, hue] of parts) {
    const part = add(e, hue, "i", x / most > 0.2 ? name : x / most > 0.04 ? name.split(" ")[0] : "");
    part.style.width = `${(100 * x) / most}%`;
  }
  add(e, "limit", "b").style.left = `${(100 * limit) / most}%`;
  e.classList.toggle("over", used > limit);
  return e;
}

function draw() {
  const chip = chips[set.GPU];
  $("panels").classList.add("stale");
  const found = plan(chip, set);
  $("panels").classList.remove("stale");
  $("refused").textContent = misfit(found, chip);
  drawTraffic(found, chip);
  drawMemory(found, chip);
  drawWaves(found, chip);
  write($("say"), verdict(found));
}

function misfit({ ok, scarce, over, limit, registers }, chip) {
  if (ok) return "";
  if (scarce === "shared memory")
    return `This tile does not fit: a thread block can have ${kib(chip.shared_per_block)} of shared memory, and it needs ${kib(over)} more.`;
  return `This tile needs about ${registers} registers a thread, ${over} more than the ${limit} to be had: they spill to memory.`;
}

function verdict({ moved, winner, ok, scarce }) {
  const others = Object.keys(moved).filter((name) => name !== winner);
  const less = others.map((name) => `${NAMES[name]} moves ${(moved[name] / moved[winner]).toFixed(1)} times as much`);
  const blocked = ok || scarce === "registers" ? "" : " But this tile cannot run here.";
  return `${NAMES[winner]} moves least: ${less.join(", ")}.${blocked}`;
}

function drawTraffic({ moved, winner, flops }, chip) {
  const most = Math.max(...Object.values(moved));
  const rows = Object.entries(moved).map(([name, x]) =>
    row(NAMES[name], [[x / most, "fill"]], bytes(2 * x), name === winner ? "now" : ""),
  );
  $("traffic").replaceChildren(...rows);
  const times = Object.values(moved).map((x) => (1e3 * 2 * x) / chip.hbm_per_second);
  const products = (1e3 * flops) / chip.tensor_flops;
  const most_ms = `${times.map((x) => x.toFixed(2)).join(", ")} ms`;
  $("traffic-note").textContent =
    `Requests of the chip in two-byte numbers, all heads. If every one went to HBM: ${most_ms}; the products alone take ${products.toFixed(2)} ms.`;
}

/** 96 KiB of 227 KiB: 131 KiB to spare, or by how much it is too much. */
function room(used, limit, unit) {
  const left = limit - used;
  return `${unit(used)} of ${unit(limit)}: ${unit(Math.abs(left))} ${left < 0 ? "too much" : "to spare"}.`;
}

function drawMemory({ parts, shared, registers, limit }, chip) {
  const tensors = Object.entries(parts).map(([name, x]) => [`${name} ${kib(x)}`, x, name.toUpperCase()]);
  $("shared").replaceChildren(gauge(tensors, chip.shared_per_block, shared));
  const each_tensor = tensors.map(([name]) => name).join(" + ");
  $("shared-note").textContent = `${each_tensor} = ${room(shared, chip.shared_per_block, kib)} k and v in every stage.`;
  const threads = 32 * set.warps;
  const scores = (set.B_r * set.B_c) / threads;
  const each = [
    ["o", (set.B_r * set.d) / threads, "O"],
    ["s", scores, "S"],
    ["p", scores / 2, "P"],
    ["rest", FIXED_REGISTERS, "rest"],
  ];
  $("registers").replaceChildren(gauge(each, limit, registers));
  const what = "o and s in fp32, p in two bytes; the rest is addresses, m and ℓ.";
  $("registers-note").textContent = `About ${room(registers, limit, String)} ${what}`;
}

function drawWaves({ programs, perSM, by, slots, waves, busy, fa1Programs }, chip) {
  $("waves").replaceChildren();
  if (!slots) {
    $("waves-note").textContent = "No thread block of this size runs on this GPU.";
    return;
  }
  const last = programs - (waves - 1) * slots;
  const shown = Math.min(waves, 8);
  for (const k of upTo(shown)) {
    const n = k < shown - 1 || waves > 8 ? slots : last;
    $("waves").append(row(`wave ${k + 1}`, [[n / slots, "fill"]], `${n} of ${slots}`));
  }
  const more = waves > 8 ? ` The last of ${waves} waves has ${last}.` : "";
  const places = `${grouped(programs)} thread blocks on ${chip.SMs} SMs × ${perSM} (limited by ${by}): ${grouped(waves)} ${waves === 1 ? "wave" : "waves"}, ${percent(busy)} of the places busy.`;
  $("waves-note").textContent =
    `${places}${more} FA1 has ${fa1Programs} ${fa1Programs === 1 ? "thread block" : "thread blocks"}, one a head.`;
}

/** The next power of two up or down: what a tile can be; ↑ and ↓ in a field go there. */
form.addEventListener("keydown", (e) => {
  const { name, value } = e.target;
  if (!(name in LABELS) || !["ArrowUp", "ArrowDown"].includes(e.key)) return;
  e.preventDefault();
  const power =
    e.key === "ArrowUp" ? Math.floor(Math.log2(Number(value) || 1)) + 1 : Math.ceil(Math.log2(Number(value) || 1)) - 1;
  e.target.value = 2 ** Math.max(0, power);
  form.oninput();
});
form.elements.GPU.value = set.GPU;
follow(form, set, draw);
