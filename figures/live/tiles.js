/* The tile playground: sizes in, traffic, memory on chip, programs and waves out. All numbers are from states.js. */
"use strict";

const { chips } = window.LIVE;
const set = { GPU: "H200", N: 8192, d: 128, B_r: 128, B_c: 64, heads: 16, warps: 8, stages: 2, causal: false };
const form = $("settings");
const powers = (low, high) => upTo(high + 1).slice(low).map((n) => 2 ** n);
const SIZES_OF = {
  N: ["N (tokens)", powers(7, 20)],
  d: ["d", [16, 32, 64, 80, 96, 128, 192, 256]],
  B_r: ["B<sub>r</sub> (queries)", [16, 32, 48, 64, 96, 128, 192, 256]],
  B_c: ["B<sub>c</sub> (keys)", [16, 32, 48, 64, 96, 128, 192, 256]],
  heads: ["batch × heads", upTo(257).slice(1)],
}; // prettier-ignore

form.innerHTML = [
  `<label class="field"><span>GPU</span><select name="GPU">${Object.keys(chips)
    .map((x) => `<option>${x}</option>`)
    .join("")}</select></label>`,
  ...Object.entries(SIZES_OF).map(([name, [label, values]]) => slider(name, label, values)),
  choice("warps", "warps", [["4"], ["8"]]),
  choice("stages of k, v", "stages", [["1"], ["2"], ["3"]]),
  choice("mask", "causal", [["true", "causal"]], "checkbox"),
].join("");

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

/** A bar of parts against a limit, which is drawn as a line. */
function gauge(parts, limit, used, said) {
  const most = Math.max(limit, used) * 1.08;
  const e = make("div", "gauge");
  for (const [name, x, hue] of parts) {
    const part = add(e, hue, "i", x / most > 0.2 ? name : x / most > 0.04 ? name.split(" ")[0] : "");
    part.style.width = `${(100 * x) / most}%`;
  }
  add(e, "limit", "b").style.left = `${(100 * limit) / most}%`;
  if (used < 0.7 * limit) add(e, "most", "small", `at most ${said}`).style.right = `${102 - (100 * limit) / most}%`;
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
  return `This tile needs about ${registers} registers per thread, ${over} more than the ${limit} to be had: they spill to memory.`;
}

/** How much more than the least, in words. */
function compared(ratio) {
  return ratio < 1.05 ? "about as much" : `${ratio.toFixed(ratio < 10 ? 1 : 0)} times as much`;
}

function verdict({ moved, winner, ok, scarce, programs, slots, waves }) {
  const others = Object.keys(moved).filter((name) => name !== winner);
  const ratio = (name) => moved[name].requested / moved[winner].requested;
  const [one, two] = others.map((name) => `${NAMES[name]} ${compared(ratio(name))}`);
  const { requested, dram } = moved.fa2;
  const blocked = ok || scarce === "registers" ? "" : " But this tile cannot run here.";
  const fills = slots ? percent((programs - (waves - 1) * slots) / slots) : "";
  const ends = waves === 1 ? `make one wave, which fills ${fills} of the slots` : `make ${grouped(waves)} waves, and the last one fills ${fills} of the slots`;
  const runs = slots ? ` FA2’s ${grouped(programs)} thread ${programs === 1 ? "block" : "blocks"} ${ends}.` : "";
  return `${NAMES[winner]} requests least. ${one}, and ${two}. Of FA2’s requests, ${percent(dram / requested)} reach DRAM.${runs}${blocked}`;
}

function drawTraffic({ moved, flops }, chip) {
  const most = Math.max(...Object.values(moved).map(({ requested }) => requested));
  const rows = Object.entries(moved).map(([name, { requested, dram }]) => {
    const parts = [[requested / most, "outline"], [dram / most, "fill"]]; // prettier-ignore
    return row(NAMES[name], parts, `${bytes(requested)} → ${bytes(dram)}`, name === "fa2" ? "now" : "");
  });
  rows.unshift(row("", [], "requested → DRAM", "names"));
  $("traffic").replaceChildren(...rows);
  const times = Object.entries(moved).map(([name, { dram }]) => `${NAMES[name]} ${seconds(dram / chip.hbm_per_second)}`);
  $("traffic-note").textContent =
    `An outline shows the bytes that the chip requests, and its fill those that reach DRAM, because L2 does not have them (a model). For that, DRAM needs these times: ${times.join(", ")}. The two matmuls need ${seconds(flops / chip.tensor_flops)} of the tensor cores.`;
}

/** 96 KiB of 227 KiB: 131 KiB to spare, or by how much it is too much. */
function room(used, limit, unit) {
  const left = limit - used;
  return `${unit(used)} of ${unit(limit)}: ${unit(Math.abs(left))} ${left < 0 ? "too much" : "to spare"}.`;
}

function drawMemory({ parts, shared, registers, limit }, chip) {
  const tensors = Object.entries(parts).map(([name, x]) => [`${name} ${kib(x)}`, x, name.toUpperCase()]);
  $("shared").replaceChildren(gauge(tensors, chip.shared_per_block, shared, kib(chip.shared_per_block)));
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
  $("registers").replaceChildren(gauge(each, limit, registers, `${limit}`));
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
  const places = `${grouped(programs)} thread blocks on ${chip.SMs} SMs × ${perSM} (limited by ${by}): ${grouped(waves)} ${waves === 1 ? "wave" : "waves"}, ${percent(busy)} of the slots busy.`;
  $("waves-note").textContent =
    `${places}${more} FA1 has ${fa1Programs} ${fa1Programs === 1 ? "thread block" : "thread blocks"}, one per head.`;
}

form.elements.GPU.value = set.GPU;
follow(form, set, draw);
