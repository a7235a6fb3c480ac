/* Algorithm 1, live. It draws step t of a run and remembers nothing but t, the settings and the numbers: so stepping
   back is free, and a drag is a new run. */
"use strict";

const N = Number(ask.get("n") || 8);
const d = Number(ask.get("d") || 2);
const set = {
  order: ask.get("order") || "fa2",
  B_r: Number(ask.get("br") || 4),
  B_c: Number(ask.get("bc") || 2),
  causal: ask.has("causal"),
};
const stage = $("stage");
const form = $("settings");
let data; // q, k and v
let clean; // the same before the reader dragged
let bias = null; // what the reader added to scores
let runs; // the steps of all three algorithms
let run; // those of the chosen one
let chosen = null; // the row of a block that the sentences speak of
let cells = {}; // where everything stands

const BLOCKS = [["1"], ["2"], ["4"], ["8"]];
const LOOPS = [
  ["standard", "Standard"],
  ["fa1", "FA1"],
  ["fa2", "FA2"],
];
form.innerHTML = [
  choice("algorithm", "order", LOOPS),
  choice("B<sub>r</sub> (queries)", "B_r", BLOCKS),
  choice("B<sub>c</sub> (keys)", "B_c", BLOCKS),
  choice("mask", "causal", [["causal"]], "checkbox"),
  `<fieldset><legend>numbers</legend><button type="button" id="fresh">new</button><button type="button" id="undo">undo drags</button></fieldset>`,
].join("");

const DWELL = { shrink: 700, add: 1100, end: 1500, store: 800, s: 1000, max: 1100, p: 900, S: 350, P: 350, O: 350 };
const transport = new Transport($("transport"), { draw, dwell, t: Number(ask.get("step") || 0) });

/** How long a step stays: longest where o shrinks. */
function dwell(t) {
  const step = run[t];
  const shrinks = step.op === "shrink" && step.factor.some((x, a) => x < 1 && step.before[a] > -Infinity);
  return shrinks ? 1800 : DWELL[step.op] || 800;
}

// What stands on the stage --------------------------------------------------------------------------------------------

const grid = (kind, rows, columns, className) =>
  upTo(rows).map((a) =>
    upTo(columns).map((b) => {
      const e = add(stage, `cell ${className}`);
      e.at = { kind, a, b };
      e.small = add(e, "small", "small");
      e.value = add(e, "", "span");
      return e;
    }),
  );

function bar(className) {
  const e = add(stage, `bar ${className}`);
  e.fill = add(e, "fill", "i");
  e.was = add(e, "was", "i");
  e.value = add(e, "", "b");
  return e;
}

const words = (className, text) => add(stage, className, "div", String(text));
const [q, k, v] = ["q", "k", "v"].map((name) => grid(name, N, d, name.toUpperCase()));
const s = grid("s", N, N, "S");
const [m, l] = ["m", "l"].map((name) => upTo(N).map(() => bar(name)));
const o = upTo(N).map(() => upTo(d).map(() => bar("o")));
const alpha = upTo(N).map(() => add(stage, "alpha"));
const [rowTick, colTick, stateTick] = upTo(3).map(() => upTo(N).map((r) => words("tick", r + 1)));
const names = Object.fromEntries(["Q", "Kᵀ", "Vᵀ", "m", "α", "ℓ", "o"].map((name) => [name, words("name", name)]));
const kept = add(stage, "caption");
const result = add(stage, "caption");
const frames = Object.fromEntries(["q", "kv", "s", "o"].map((name) => [name, add(stage, "window")]));

/** Sizes in pixels: the state of the rows stands beside the square, and below it on a narrow page. */
function measure() {
  const width = stage.clientWidth;
  const wide = width >= 560;
  const [tick, gap] = [18, wide ? 12 : 8];
  const columns = wide ? N + 0.85 * d + 3.15 + 1.2 * d : N + d;
  const c = Math.floor((width - tick - (wide ? 2 * gap : gap)) / columns);
  const [qw, kh] = [wide ? Math.floor(0.85 * c) : c, Math.max(21, Math.floor(c * 0.56))];
  const [xs, y0] = [tick + d * qw + gap, 16];
  const ys = y0 + 2 * d * kh + 14;
  return {
    ...{ c, qw, kh, x0: tick, xs, y0, ys, wide },
    rh: wide ? c : Math.max(30, Math.floor(c * 0.8)),
    sx: wide ? xs + N * c + gap : tick,
    sw: wide ? c : (width - tick) / (3.15 + 1.2 * d),
    sy: wide ? ys : ys + N * c + 66,
  };
}

function layout() {
  cells = measure();
  const { c, qw, kh, x0, xs, y0, ys, sx, sw, sy, rh, wide } = cells;
  stage.style.setProperty("--digits", `${Math.min(15, Math.max(10.5, c * 0.3))}px`);
  stage.style.setProperty("--top", c < 40 ? 400 : 700); // bold digits need room
  for (const r of upTo(N)) {
    put(rowTick[r], 0, ys + r * c + c / 2 - 8, 15, 16);
    put(colTick[r], xs + r * c, 0, c, 14);
    put(stateTick[r], 0, sy + r * rh + rh / 2 - 8, 15, 16);
    stateTick[r].hidden = wide;
    for (const e of upTo(d)) {
      put(q[r][e], x0 + e * qw, ys + r * c, qw + 1, c + 1);
      put(k[r][e], xs + r * c, y0 + e * kh, c + 1, kh + 1);
      put(v[r][e], xs + r * c, y0 + 5 + (d + e) * kh, c + 1, kh + 1);
      put(o[r][e], sx + (3.15 + 1.2 * e) * sw, sy + r * rh, 1.2 * sw + 1, rh + 1);
    }
    for (const b of upTo(N)) put(s[r][b], xs + b * c, ys + r * c, c + 1, c + 1);
    put(m[r], sx, sy + r * rh, sw + 1, rh + 1);
    put(alpha[r], sx + sw + 3, sy + r * rh + rh / 2 - 11, 1.15 * sw - 5, 22);
    put(l[r], sx + 2.15 * sw, sy + r * rh, sw + 1, rh + 1);
  }
  put(names["Kᵀ"], xs - 26, y0 + (d * kh) / 2 - 8);
  put(names["Vᵀ"], xs - 26, y0 + 5 + 1.5 * d * kh - 8);
  put(names.Q, x0, ys - 19);
  for (const [name, x] of Object.entries({ m: 0, α: 1.45, ℓ: 2.15, o: 3.15 }))
    put(names[name], sx + x * sw + 2, sy - 19);
  put(kept, xs, ys + N * c + 7);
  kept.style.width = `${N * c}px`;
  put(result, sx, sy + N * rh + 7);
  result.style.width = `${(3.15 + 1.2 * d) * sw}px`;
  stage.style.height = `${Math.max(ys + N * c, sy + N * rh) + (wide ? 44 : 28)}px`;
}

// From the settings to the run ----------------------------------------------------------------------------------------

/** Run all three; `keep` stays at this step, else at the same share of the run. */
function prepare(keep = true) {
  const share = run ? transport.t / (run.length - 1) : 0;
  runs = Object.fromEntries(LOOPS.map(([order]) => [order, steps(data.q, data.k, data.v, { ...set, order, bias })]));
  run = runs[set.order];
  run.first = firstSeen(run);
  run.exact = dense(data.q, data.k, data.v, { ...set, bias });
  run.scale = scales(run);
  transport.length(run.length);
  if (!keep) transport.t = Math.round(share * (run.length - 1));
}

/** For each cell of the square the step at which its score was made. */
function firstSeen(run) {
  const first = new Map();
  run.forEach((step, t) => {
    if (step.op !== "s" && step.op !== "S") return;
    const [from, to] = step.op === "s" ? step.cols : [0, N];
    for (let r = step.rows[0]; r < step.rows[1]; r++) for (let c = from; c < to; c++) first.set(r * N + c, t);
  });
  return first;
}

/** The largest of everything that is drawn as a length or a tint. */
function scales(run) {
  const seen = run.exact.S.flat().filter(Number.isFinite);
  const sums = run.flatMap((x) => [...(x.l || []), ...x.hbm_l.map((y) => y || 0)]);
  const outputs = run.flatMap((x) => [...(x.o || []), ...x.O.filter((y) => y)].flat().map(Math.abs));
  return {
    low: Math.min(...seen),
    high: Math.max(...seen),
    l: Math.max(1, ...sums),
    o: Math.max(0.1, ...outputs),
    held: Math.max(...run.map((x) => x.held)),
  };
}

/** The query that the sentences speak of: the chosen one of this block, or else the one that shrinks most. */
function focus(step) {
  if (!step.rows) return 0;
  const n = step.rows[1] - step.rows[0];
  if (chosen !== null) return step.rows[0] + Math.min(chosen, n - 1);
  const lost = Array(n).fill(0);
  for (const x of runs.fa2.filter((y) => y.op === "shrink"))
    x.alpha.forEach((y, a) => {
      const r = x.rows[0] + a - step.rows[0];
      if (x.before[a] > -Infinity && r in lost) lost[r] += 1 - y;
    });
  return step.rows[0] + lost.indexOf(Math.max(...lost));
}

// Drawing a step ------------------------------------------------------------------------------------------------------

function draw(t) {
  const step = run[t];
  const row = focus(step);
  for (const r of upTo(N)) {
    const a = step.rows ? r - step.rows[0] : 0;
    rowTick[r].classList.toggle("focus", r === row && Boolean(step.rows));
    stateTick[r].classList.toggle("focus", r === row && Boolean(step.rows));
    drawInputs(step, r, row);
    for (const b of upTo(N)) drawScore(step, t, r, b, a, row);
    drawState(step, r, a);
  }
  drawFrames(step);
  drawCaptions(step, t);
  $("say").setAttribute("aria-live", transport.timer ? "off" : "polite");
  write($("say"), say(step, row, { N_q: N, N_k: N, ...set }));
  transport.slider.setAttribute("aria-valuetext", `step ${t} of ${run.length - 1}: ${$("say").textContent}`);
  drawCode(step, row);
  drawMeter(step, t);
  $("undo").disabled = !bias && JSON.stringify(data) === JSON.stringify(clean);
}

/** A cell that can be dragged; those of the row in question are reached by the keyboard, too. */
function grab(cell, yes, row, label, x) {
  cell.classList.toggle("grab", yes);
  const keyed = yes && (cell.at.kind === "s" || cell.at.kind === "q") && cell.at.a === row;
  const slider = { tabindex: 0, role: "slider", "aria-label": label, "aria-valuenow": keyed && x.toFixed(2) };
  for (const [name, value] of Object.entries({ ...slider, "aria-valuemin": -9, "aria-valuemax": 9 })) {
    if (keyed) cell.setAttribute(name, value);
    else cell.removeAttribute(name);
  }
}

function drawInputs(step, r, row) {
  const [inRows, inCols, all] = [within(r, step.rows), within(r, step.cols), set.order === "standard"];
  for (const e of upTo(d)) {
    for (const [cell, on, name] of [
      [q[r][e], step.q && inRows, "q"],
      [k[r][e], step.k && (inCols || all), "k"],
      [v[r][e], step.v && (inCols || all), "v"],
    ]) {
      const x = data[name][r][e];
      cell.classList.toggle("on", Boolean(on));
      write(cell.value, show(x, 1));
      grab(cell, Boolean(on), row, `${name} of ${r + 1}, entry ${e + 1}`, x);
    }
  }
}

function drawScore(step, t, r, b, a, row) {
  const cell = s[r][b];
  const { low, high } = run.scale;
  const hidden = b >= keysSeen(r, N, N, set.causal);
  const here = (step.s || step.p) && within(r, step.rows) && within(b, step.cols);
  const c = step.cols ? b - step.cols[0] : 0;
  const S = here ? step.s[a][c] : (step.S?.[r]?.[b] ?? null);
  const P = here ? step.p?.[a][c] : step.P?.[r]?.[b];
  const shown = S !== null && !(hidden && S === -Infinity && !here);
  let level = S === -Infinity ? 0 : 0.3 + (0.7 * (S - low)) / (high - low || 1);
  if (P != null) level = 0.12 + 0.5 * P;
  cell.style.setProperty("--x", shown ? `calc(var(--most) * ${Math.max(0, level).toFixed(3)})` : "0%");
  write(cell.value, shown ? show(P ?? S) : "");
  write(cell.small, shown && P != null && S > -Infinity ? show(S) : "");
  cell.classList.toggle("top", Boolean(here && !step.p && S > -Infinity && S === Math.max(...step.s[a])));
  cell.classList.toggle("hide", hidden && !shown);
  cell.classList.toggle("moved", Boolean(bias) && Math.abs(bias[r][b]) > 0.005);
  cell.classList.toggle("seen", !shown && !hidden && run.first.get(r * N + b) <= t);
  grab(cell, Boolean(here && !hidden), row, `score of query ${r + 1} and key ${b + 1}`, S || 0);
}

/** What HBM holds of a row's state, where it is not on chip. */
function stored(step, r) {
  if (!step.O[r]) return {};
  const fa1 = set.order === "fa1";
  return { m: fa1 ? step.hbm_m[r] : null, l: fa1 ? step.hbm_l[r] : null, o: step.O[r] };
}

function drawState(step, r, a) {
  const { scale } = run;
  const mine = Boolean(within(r, step.rows) && step.o && set.order !== "standard");
  const now = mine ? { m: step.m[a], l: step.l[a], o: step.o[a] } : stored(step, r);
  const was = (mine && step.was) || {};
  const fill = (e, x, share, old, middle = false) => {
    e.classList.toggle("on", mine);
    e.classList.toggle("done", !mine && Boolean(now.o));
    e.fill.style.transform = `scaleX(${x == null || x === -Infinity ? 0 : share(x)})`;
    write(e.value, x == null ? "" : show(x));
    e.was.hidden = old == null || old === -Infinity || Math.abs(old - x) < 5e-3;
    if (!e.was.hidden) e.was.style.left = `calc(${100 * (middle ? 0.5 + share(old) / 2 : share(old))}% - 1px)`;
  };
  fill(m[r], now.m, (x) => 0.04 + (0.96 * (x - scale.low)) / (scale.high - scale.low || 1), was.m?.[a]);
  fill(l[r], now.l, (x) => x / scale.l, was.l?.[a]);
  for (const e of upTo(d)) fill(o[r][e], now.o ? now.o[e] : null, (x) => x / scale.o, was.o?.[a][e], true);
  if (now.o && !mine && set.order === "fa2") write(m[r].value, `L ${show(step.L[r], 1)}`);
  const factor = within(r, step.rows) && step.op !== "end" ? step.factor || step.alpha : null;
  const less = Boolean(factor && factor[a] < 1 - 1e-9 && step.before && step.before[a] > -Infinity);
  write(alpha[r], factor ? `×${factor[a] === 0 || factor[a] === 1 ? factor[a] : show(factor[a])}` : "");
  alpha[r].classList.toggle("less", less);
  alpha[r].classList.toggle("flash", less && step.op === "shrink");
}

function drawFrames(step) {
  const { c, qw, kh, x0, xs, y0, ys, sx, sw, sy, rh } = cells;
  const [r0, r1] = step.rows || [0, 0];
  const [c0, c1] = step.cols || [0, 0];
  const box = (frame, yes, x, y, w, h) => {
    frame.classList.toggle("off", !yes);
    if (yes) put(frame, x - 2, y - 2, w + 5, h + 5);
  };
  box(frames.q, step.q, x0, ys + r0 * c, d * qw, (r1 - r0) * c);
  box(frames.o, step.o, sx, sy + r0 * rh, (3.15 + 1.2 * d) * sw, (r1 - r0) * rh);
  const all = set.order === "standard";
  box(frames.kv, step.k && !all, xs + c0 * c, y0, (c1 - c0) * c, 2 * d * kh + 5);
  if (all) box(frames.s, step.rows, xs, ys + r0 * c, N * c, c);
  else box(frames.s, step.s || step.p, xs + c0 * c, ys + r0 * c, (c1 - c0) * c, (r1 - r0) * c);
}

function drawCaptions(step, t) {
  const made = [...run.first.values()].filter((u) => u <= t).length;
  const all = set.order === "standard";
  const weights = all ? step.P.filter((x) => x).length * N : 0;
  const squares = `<b>${made}</b> scores and <b>${weights}</b> weights kept`;
  write(kept, all ? squares : `<b>${step.parts.s}</b> of ${N * N} scores kept · standard: all`);
  const finished = upTo(N).filter((r) => step.O[r] && (set.order !== "fa1" || step.op === "done"));
  const apart = finished.flatMap((r) => step.O[r].map((x, e) => Math.abs(x - run.exact.O[r][e])));
  const text = `${finished.length} of ${N} rows done. Difference from the whole square: `;
  write(result, finished.length ? `${text}<b>${Math.max(...apart).toFixed(3)}</b>` : "");
  write(names.o, step.op === "done" ? "O" : "o");
}

const TITLES = {
  standard: "Standard attention: three kernels",
  fa1: "FlashAttention (FA1): keys outside",
  fa2: "FlashAttention-2 (FA2): queries outside",
};
const PAPERS = {
  standard: "",
  fa1: "Right: the lines of Algorithm 2 in the FA1 paper. ",
  fa2: "Right: the lines of Algorithm 1 in the FA2 paper. ",
};

/** The listing as list items; a line that runs at some step has a line of numbers below it. */
function writeCode(code) {
  code.order = set.order;
  code.replaceChildren();
  code.items = LISTING[set.order].map(([text, line, ops]) => {
    const item = add(code, "", "li");
    item.style.paddingLeft = `${10 + (18 * text.search(/\S/)) / 4}px`;
    const marked = text.trim().replace(/\|(.*?)\|/g, '<mark class="a">$1</mark>');
    item.innerHTML = marked.replace(/~(.*?)~/g, '<mark class="b">$1</mark>') + (line ? `<small>${line}</small>` : "");
    if (ops && set.order !== "standard" && ops !== "init") item.numbers = add(item, "", "span");
    return item;
  });
  $("code-title").textContent = TITLES[set.order];
}

function drawCode(step, row) {
  const code = $("code");
  if (code.order !== set.order) writeCode(code);
  const numbers = values(step, row);
  code.items.forEach((item, n) => {
    const now = LISTING[set.order][n][2].split(" ").includes(step.op);
    item.className = now ? `now ${step.op}` : "";
    if (now) item.setAttribute("aria-current", "step");
    else item.removeAttribute("aria-current");
    if (item.numbers) write(item.numbers, numbers[n] || "&nbsp;");
  });
  const whose = step.rows && set.order !== "standard" ? `Numbers: query ${row + 1}. ` : "";
  const tau = d === 2 ? ", and τ = 1/√2 = 0.71" : "";
  write($("code-note"), `${PAPERS[set.order]}${whose}Q[i] is row block i, K[j] is column block j${tau}.`);
}

const PARTS = {};
for (const name of "qkvomls") PARTS[name] = add($("chip"), "ml".includes(name) ? name : name.toUpperCase(), "span");
const METERS = Object.fromEntries(
  LOOPS.map(([order, text]) => {
    const e = add($("meter"), "row");
    e.innerHTML = `<span>${text}</span><div><i></i><i></i></div><span></span>`;
    return [order, e];
  }),
);

function drawMeter(step, t) {
  const share = t / (run.length - 1);
  const most = Math.max(...Object.values(runs).map((x) => x.at(-1).moved));
  for (const [order, e] of Object.entries(METERS)) {
    const all = runs[order].at(-1).moved;
    const at = order === set.order ? t : Math.round(share * (runs[order].length - 1));
    const [outline, fill] = e.querySelectorAll("i");
    e.classList.toggle("now", order === set.order);
    outline.style.width = `${(100 * all) / most}%`;
    fill.style.width = `${(100 * runs[order][at].moved) / most}%`;
    write(e.lastChild, `${runs[order][at].moved} of ${all}`);
  }
  const real = { N_q: 8192, N_k: 8192, B_r: 128, B_c: 128, causal: set.causal };
  const [one, two, three] = LOOPS.map(([order]) => Math.round(traffic(order, real, 64) / 1e6));
  const note = `Loads and stores, each at the same point of its own run. With such small tiles FA1 can move more than
    standard attention. At N = 8,192, d = 64 and tiles of 128 × 128 the three move ${one}, ${two} and ${three} million.`;
  write($("meter-note"), note);
  $("held").textContent = step.held;
  for (const [name, e] of Object.entries(PARTS)) {
    const x = step.parts[name];
    const letter = name === "l" ? "ℓ" : name === "s" && step.p ? "p" : name;
    e.style.width = `${(100 * x) / run.scale.held}%`;
    write(e, x ? `${letter} ${x}` : "");
  }
  const held = Object.entries(step.parts).filter(([, x]) => x);
  $("chip").setAttribute("aria-label", held.map(([name, x]) => `${name}: ${x}`).join(", ") || "nothing");
}

// What the reader does ------------------------------------------------------------------------------------------------

form.oninput = () => {
  const said = new FormData(form);
  set.order = said.get("order");
  set.B_r = Number(said.get("B_r")) || set.B_r;
  set.B_c = Number(said.get("B_c")) || set.B_c;
  set.causal = said.has("causal");
  transport.pause();
  prepare(false);
  sync();
  transport.show();
};

function sync() {
  mark(form, set);
  for (const name of ["B_r", "B_c"]) for (const e of form.elements[name]) e.disabled = set.order === "standard";
}

function fresh(seed) {
  data = numbers(seed, N, d);
  clean = copy(data);
  [bias, chosen] = [null, null];
  prepare();
}

/** Whether a run shows something: o shrinks often and by much. */
function lively() {
  const factors = runs.fa2.filter((x) => x.op === "shrink").flatMap((x) => x.alpha);
  return factors.filter((x) => x > 0 && x < 0.7).length > N / 2;
}

$("fresh").onclick = () => {
  for (let n = 0; n < 40; n++) {
    fresh(Math.floor(Math.random() * 1e6));
    if (lively()) break;
  }
  transport.jump(transport.t);
};
$("undo").onclick = () => {
  [data, bias] = [copy(clean), null];
  prepare();
  transport.show();
};

/** An entry of q, k or v is changed itself; to a score something is added. */
const product = ({ a, b }) => dot(data.q[a], data.k[b]) / Math.sqrt(d);
const value = (at) => (at.kind === "s" ? product(at) + (bias ? bias[at.a][at.b] : 0) : data[at.kind][at.a][at.b]);

/** The sentences stay with the row that the reader changes. */
function choose({ kind, a }) {
  if (["s", "q"].includes(kind)) chosen = a - run[transport.t].rows[0];
}

function nudge(at, x) {
  const next = Math.min(9, Math.max(-9, x));
  if (at.kind === "s") {
    bias = bias || upTo(N).map(() => Array(N).fill(0));
    bias[at.a][at.b] = next - product(at);
  } else data[at.kind][at.a][at.b] = Math.round(10 * next) / 10;
  prepare();
  transport.show();
}

stage.addEventListener("keydown", (e) => {
  const change = { ArrowUp: 0.1, ArrowDown: -0.1 }[e.key];
  if (!e.target.at || !change) return;
  e.preventDefault();
  choose(e.target.at);
  nudge(e.target.at, value(e.target.at) + change);
});
stage.addEventListener("pointerdown", (e) => {
  const cell = e.target.closest(".cell");
  if (!cell || !cell.classList.contains("grab")) return;
  e.preventDefault();
  transport.pause();
  cell.setPointerCapture(e.pointerId);
  cell.classList.add("held");
  const start = { y: e.clientY, x: value(cell.at) };
  choose(cell.at);
  cell.onpointermove = (f) => nudge(cell.at, start.x + (start.y - f.clientY) / 40);
  cell.onpointerup = cell.onpointercancel = () => {
    cell.onpointermove = null;
    cell.classList.remove("held");
  };
  transport.show();
});

fresh(Number(ask.get("seed") || 13));
sync();
layout();
transport.show();
onWidth(stage, () => {
  layout();
  transport.show();
});
