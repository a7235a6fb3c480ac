/* Algorithm 1, live: a board for each algorithm that is shown. A board draws one step of a run, and the page remembers
   nothing but t, the settings and the numbers: so stepping back is free, and a drag is a new run. */
"use strict";

const d = 2;
const few = ask.has("deck"); // fewer and larger numbers, for a lecture hall
const set = {
  order: ask.get("order") || "fa2",
  B_r: Number(ask.get("br") || (few ? 2 : 4)),
  B_c: Number(ask.get("bc") || 2),
  causal: ask.has("causal"),
};
const form = $("settings");
let N = 8;
let words = []; // the reader's sentence, if there is one
const SEED = few ? 6100 : 13; // with numbers of which two digits show where α comes from
let seed = Number(ask.get("seed") || SEED);
let data; // q, k and v
let clean; // the same before the reader dragged
let bias = null; // what the reader added to scores
let runs; // the steps of all three algorithms
let boards = []; // one, or FA1's and FA2's
let frames = []; // what is shown at t: for each board a step of its run
let chosen = null; // the row of a block that the sentences speak of

const BLOCKS = [["1"], ["2"], ["4"], ["8"]];
const LOOPS = [
  ["standard", "Standard"],
  ["fa1", "FA1"],
  ["fa2", "FA2"],
];
form.innerHTML = [
  choice("algorithm", "order", [...LOOPS, ["both", "FA1 beside FA2"]]),
  choice("B<sub>r</sub> (queries)", "B_r", BLOCKS),
  choice("B<sub>c</sub> (keys)", "B_c", BLOCKS),
  choice("mask", "causal", [["causal"]], "checkbox"),
  `<fieldset><legend>numbers</legend><button type="button" id="fresh">new</button><button type="button" id="undo">undo drags</button></fieldset>`,
  `<label class="field"><span>or of your own sentence</span><input id="words" placeholder="the cat saw the dog" autocomplete="off"></label>`,
].join("");

const DWELL = { shrink: 700, add: 1100, end: 1500, store: 800, s: 1000, max: 1100, p: 900, S: 350, P: 350, O: 350 };
// On a narrow page, one of two boards
let shown = ask.get("shown") === "fa1" ? "fa1" : "fa2";
$("which").innerHTML = choice("", "shown", [["fa1", "FA1: keys outside"], ["fa2", "FA2: queries outside"]]); // prettier-ignore
$("which").oninput = () => {
  shown = new FormData($("which")).get("shown");
  showOne();
  transport.pause();
  transport.show();
};

function showOne() {
  document.querySelector(".algorithm").dataset.shown = shown;
  mark($("which"), { shown });
}

const transport = new Transport($("transport"), { draw, dwell, speeds: true });
const stepOf = (board, t) => board.run[frames[t][boards.indexOf(board)]];

/** How long a step stays: longest where o shrinks. */
function dwell(t) {
  return Math.max(...boards.map((board) => (shrinks(stepOf(board, t)) ? 1800 : DWELL[stepOf(board, t).op] || 800)));
}

/** Whether this step shrinks a sum that has something in it. */
const shrinks = (step) => step.op === "shrink" && step.factor.some((x, a) => x < 0.9 && step.before[a] > -Infinity);

/** Where the columns of the state begin, in widths of a cell; α and what can be negative have more room. */
const AT = { m: 0, α: 1.15, ℓ: 2.8, o: 3.8, L: 3.9 + 1.2 * d, end: 5.05 + 1.2 * d };

/** A number in a small cell, with a shorter minus sign. */
const brief = (x, digits) => show(x, digits).replace("−", "–");

// A board -------------------------------------------------------------------------------------------------------------

function grid(stage, kind, rows, columns, className) {
  return upTo(rows).map((a) =>
    upTo(columns).map((b) => {
      const e = add(stage, `cell ${className}`);
      e.at = { kind, a, b };
      e.small = add(e, "small", "small");
      e.value = add(e, "", "span");
      return e;
    }),
  );
}

function bar(stage, className) {
  const e = add(stage, `bar ${className}`);
  e.fill = add(e, "fill", "i");
  e.was = add(e, "was", "i");
  e.value = add(e, "", "b");
  return e;
}

/** The square of scores with Q, K and V around it, and the state of every row beside it. */
class Board {
  constructor(parent, order) {
    this.order = order;
    const place = add(parent, "board");
    if (set.order === "both") add(place, "", "h2", TITLES[order]);
    this.say = add(place, "say", "p");
    this.say.setAttribute("aria-live", "polite");
    const stage = add(place, "stage");
    stage.setAttribute("role", "group");
    stage.setAttribute("aria-label", "The square of scores, with Q at its left, K and V above it, and the state of every query");
    this.lines = add(add(place, "code"), "", "ol"); // the line that runs, where the listing is below or left out
    this.stage = stage;
    for (const name of ["q", "k", "v"]) this[name] = grid(stage, name, N, d, name.toUpperCase());
    this.s = grid(stage, "s", N, N, "S");
    for (const name of ["m", "l", "L"]) this[name] = upTo(N).map(() => bar(stage, name));
    this.o = upTo(N).map(() => upTo(d).map(() => bar(stage, "o")));
    this.alpha = upTo(N).map(() => add(stage, "alpha"));
    const tick = (r) => add(stage, "tick", "div", words.length ? words[r] : String(r + 1));
    [this.rowTick, this.colTick, this.stateTick] = upTo(3).map(() => upTo(N).map(tick));
    const names = ["Q", "Kᵀ", "Vᵀ", "m", "α", "ℓ", "o", "L"];
    this.names = Object.fromEntries(names.map((name) => [name, add(stage, "name", "div", name)]));
    for (const [name, meaning] of Object.entries(MEANINGS)) this.names[name].dataset.meaning = this.names[name].title = meaning;
    [this.kept, this.result] = [add(stage, "caption"), add(stage, "caption")];
    this.frames = Object.fromEntries(["q", "kv", "s", "o"].map((name) => [name, add(stage, "window")]));
    stage.addEventListener("keydown", (e) => press(e, this));
    stage.addEventListener("pointerdown", (e) => drag(e, this));
  }

  /** Sizes in pixels: the state of the rows stands beside the square, and below it on a narrow page. */
  measure() {
    const width = this.stage.clientWidth || $("boards").clientWidth; // a hidden board has none
    const wide = width >= 520;
    const [tick, gap] = [words.length ? Math.min(62, width / 8) : 18, wide ? 12 : 8];
    const state = this.order === "fa2" || set.order === "both" ? AT.end : AT.o + 1.2 * d;
    const columns = wide ? N + 0.85 * d + state : N + d;
    const most = innerWidth > 1500 || few || set.order === "both" ? 48 : 40; // so that the code and the controls are in view
    const c = Math.min(wide ? most : 99, Math.floor((width - tick - (wide ? 2 * gap : gap)) / columns));
    const [qw, kh] = [wide ? Math.floor(0.85 * c) : c, Math.max(wide ? 20 : 17, Math.floor(c * 0.54))];
    const [xs, y0] = [tick + d * qw + gap, 16];
    const ys = y0 + 2 * d * kh + 14;
    const sx = wide ? xs + N * c + gap : tick;
    const h = wide ? c : Math.min(c, 28); // of a row of scores: on a phone, all rows of the state are on the first screen
    return {
      ...{ c, h, qw, kh, x0: tick, xs, y0, ys, wide, state, sx, tick },
      rh: wide ? c : Math.max(32, Math.floor(c * 0.7)), // the digits stand above the bars
      sw: Math.min(wide ? 1.5 * c : 99, (width - sx) / state),
      sy: wide ? ys : ys + N * h + 64,
    };
  }

  layout() {
    this.cells = this.measure();
    const { stage, rowTick, colTick, stateTick, names, kept, result } = this;
    const { c, h, qw, kh, x0, xs, y0, ys, sx, sw, sy, rh, wide, tick, state } = this.cells;
    stage.style.setProperty("--digits", `${Math.min(15, 0.42 * h, Math.max(10.5, c * (c < 38 ? 0.36 : 0.325)))}px`);
    stage.style.setProperty("--top", c < 40 ? 400 : 700); // bold digits need room
    for (const r of upTo(N)) {
      put(rowTick[r], 0, ys + r * h + h / 2 - 8, tick - 3, 16);
      put(colTick[r], xs + r * c, 0, c, 14);
      put(stateTick[r], 0, sy + r * rh + rh / 2 - 8, tick - 3, 16);
      stateTick[r].hidden = wide;
      for (const e of upTo(d)) {
        put(this.q[r][e], x0 + e * qw, ys + r * h, qw + 1, h + 1);
        put(this.k[r][e], xs + r * c, y0 + e * kh, c + 1, kh + 1);
        put(this.v[r][e], xs + r * c, y0 + 5 + (d + e) * kh, c + 1, kh + 1);
        put(this.o[r][e], sx + (AT.o + 1.2 * e) * sw, sy + r * rh, 1.2 * sw + 1, rh + 1);
      }
      for (const b of upTo(N)) put(this.s[r][b], xs + b * c, ys + r * h, c + 1, h + 1);
      put(this.m[r], sx, sy + r * rh, AT.α * sw + 1, rh + 1);
      put(this.alpha[r], sx + AT.α * sw + 4, sy + r * rh + rh / 2 - 11, (AT.ℓ - AT.α) * sw - 7, 22);
      put(this.l[r], sx + AT.ℓ * sw, sy + r * rh, sw + 1, rh + 1);
      put(this.L[r], sx + AT.L * sw, sy + r * rh, (AT.end - AT.L) * sw + 1, rh + 1);
      this.L[r].hidden = this.order !== "fa2";
    }
    put(names["Kᵀ"], xs - 26, y0 + (d * kh) / 2 - 8);
    put(names["Vᵀ"], xs - 26, y0 + 5 + 1.5 * d * kh - 8);
    put(names.Q, x0, ys - 19);
    const wides = { m: AT.α, α: AT.ℓ - AT.α, ℓ: 1, o: 1.2 * d, L: AT.end - AT.L };
    for (const [name, w] of Object.entries(wides)) put(names[name], sx + AT[name] * sw, sy - 19, w * sw, 16);
    names.L.hidden = this.order !== "fa2";
    put(kept, xs, ys + N * h + 7);
    kept.style.width = `${wide ? N * c : sw * state + sx - xs}px`;
    put(result, sx, sy + N * rh + 7);
    result.style.width = `${state * sw}px`;
    stage.style.height = `${Math.max(ys + N * h, sy + N * rh) + 50}px`; // two lines
  }

  draw(t) {
    const step = this.run[t];
    const row = focus(step);
    for (const r of upTo(N)) {
      const a = step.rows ? r - step.rows[0] : 0;
      this.rowTick[r].classList.toggle("focus", r === row && Boolean(step.rows));
      this.stateTick[r].classList.toggle("focus", r === row && Boolean(step.rows));
      this.drawInputs(step, r, row);
      for (const b of upTo(N)) this.drawScore(step, t, r, b, a, row);
      this.drawState(step, r, a);
    }
    write(this.names.α, this.order === "fa1" && step.factor ? "αℓ/ℓ<sub>new</sub>" : "α");
    this.drawFrames(step);
    this.drawCaptions(step, t);
    this.say.setAttribute("aria-live", transport.timer ? "off" : "polite");
    write(this.say, typeset(say(step, row, { N_q: N, N_k: N, ...set })));
    drawCode(this.lines, step, row);
  }

  /** A cell that can be dragged; those of the row in question are reached by the keyboard, too. */
  grab(cell, yes, row, label, x) {
    cell.classList.toggle("grab", yes);
    const keyed = yes && (cell.at.kind === "s" || cell.at.kind === "q") && cell.at.a === row;
    const slider = { tabindex: 0, role: "slider", "aria-label": label, "aria-valuenow": keyed && x.toFixed(2) };
    for (const [name, value] of Object.entries({ ...slider, "aria-valuemin": -9, "aria-valuemax": 9 })) {
      if (keyed) cell.setAttribute(name, value);
      else cell.removeAttribute(name);
    }
  }

  drawInputs(step, r, row) {
    const [inRows, inCols, all] = [within(r, step.rows), within(r, step.cols), this.order === "standard"];
    for (const e of upTo(d)) {
      for (const [cell, on, name] of [
        [this.q[r][e], step.q && inRows, "q"],
        [this.k[r][e], step.k && (inCols || all), "k"],
        [this.v[r][e], step.v && (inCols || all), "v"],
      ]) {
        const x = data[name][r][e];
        cell.classList.toggle("on", Boolean(on));
        write(cell.value, brief(x, 1));
        this.grab(cell, Boolean(on), row, `${name} of ${r + 1}, entry ${e + 1}`, x);
      }
    }
  }

  drawScore(step, t, r, b, a, row) {
    const cell = this.s[r][b];
    const { low, high } = this.run.scale;
    const hidden = b >= keysSeen(r, N, N, set.causal);
    const here = (step.s || step.p) && within(r, step.rows) && within(b, step.cols);
    const c = step.cols ? b - step.cols[0] : 0;
    const S = here ? step.s[a][c] : (step.S?.[r]?.[b] ?? null);
    const P = here ? step.p?.[a][c] : step.P?.[r]?.[b];
    const shown = S !== null && !(hidden && S === -Infinity && !here);
    let level = S === -Infinity ? 0 : 0.3 + (0.7 * (S - low)) / (high - low || 1);
    if (P != null) level = 0.12 + 0.5 * P;
    cell.style.setProperty("--x", shown ? `calc(var(--most) * ${Math.max(0, level).toFixed(3)})` : "0%");
    const score = (x) => brief(x, this.cells.c < 38 ? 1 : 2);
    write(cell.value, shown ? (P != null ? show(P) : score(S)) : "");
    write(cell.small, shown && P != null && S > -Infinity ? score(S) : "");
    cell.classList.toggle("top", Boolean(here && !step.p && S > -Infinity && S === Math.max(...step.s[a])));
    cell.classList.toggle("hide", hidden && !shown);
    cell.classList.toggle("moved", Boolean(bias) && Math.abs(bias[r][b]) > 0.005);
    cell.classList.toggle("seen", !shown && !hidden && this.run.first.get(r * N + b) <= t);
    this.grab(cell, Boolean(here && !hidden), row, `score of query ${r + 1} and key ${b + 1}`, S || 0);
  }

  /** What HBM holds of a row's state, where it is not on chip. */
  stored(step, r) {
    if (!step.O[r]) return {};
    const fa1 = this.order === "fa1";
    return { m: fa1 ? step.hbm_m[r] : null, l: fa1 ? step.hbm_l[r] : null, o: step.O[r] };
  }

  drawState(step, r, a) {
    const { scale } = this.run;
    const mine = Boolean(within(r, step.rows) && step.o && this.order !== "standard");
    const now = mine ? { m: step.m[a], l: step.l[a], o: step.o[a] } : this.stored(step, r);
    const was = (mine && step.was) || {};
    const fill = (e, x, share, old, middle = false) => {
      e.classList.toggle("on", mine && x != null);
      e.classList.toggle("done", !mine && Boolean(now.o));
      e.fill.style.transform = `scaleX(${x == null || x === -Infinity ? 0 : share(x)})`;
      write(e.value, x == null ? "" : show(x));
      e.was.hidden = old == null || old === -Infinity || Math.abs(old - x) < 5e-3;
      if (!e.was.hidden) e.was.style.left = `calc(${100 * (middle ? 0.5 + share(old) / 2 : share(old))}% - 1px)`;
    };
    fill(this.m[r], now.m, (x) => 0.04 + (0.96 * (x - scale.low)) / (scale.high - scale.low || 1), was.m?.[a]);
    fill(this.l[r], now.l, (x) => x / scale.l[r], was.l?.[a]);
    for (const e of upTo(d)) fill(this.o[r][e], now.o ? now.o[e] : null, (x) => x / scale.o[r], was.o?.[a][e], true);
    fill(this.L[r], mine ? null : step.L[r], (x) => 0.04 + (0.96 * (x - scale.low)) / (scale.high + 2 - scale.low || 1));
    const factor = within(r, step.rows) && step.op !== "end" ? step.factor || step.alpha : null;
    const less = Boolean(factor && factor[a] < 1 - 1e-9 && step.before && step.before[a] > -Infinity);
    write(this.alpha[r], factor ? `×${factor[a] === 0 || factor[a] === 1 ? factor[a] : show(factor[a], 3)}` : "");
    this.alpha[r].classList.toggle("less", less);
    this.alpha[r].classList.toggle("flash", less && step.op === "shrink");
  }

  drawFrames(step) {
    const { c, h, qw, kh, x0, xs, y0, ys, sx, sw, sy, rh, state } = this.cells;
    const [r0, r1] = step.rows || [0, 0];
    const [c0, c1] = step.cols || [0, 0];
    const box = (frame, yes, x, y, w, h) => {
      frame.classList.toggle("off", !yes);
      if (yes) put(frame, x - 2, y - 2, w + 5, h + 5);
    };
    box(this.frames.q, step.q, x0, ys + r0 * h, d * qw, (r1 - r0) * h);
    box(this.frames.o, step.o, sx, sy + r0 * rh, (this.order === "fa2" ? state : AT.o + 1.2 * d) * sw, (r1 - r0) * rh);
    const all = this.order === "standard";
    box(this.frames.kv, step.k && !all, xs + c0 * c, y0, (c1 - c0) * c, 2 * d * kh + 5);
    if (all) box(this.frames.s, step.rows, xs, ys + r0 * h, N * c, h);
    else box(this.frames.s, step.s || step.p, xs + c0 * c, ys + r0 * h, (c1 - c0) * c, (r1 - r0) * h);
  }

  drawCaptions(step, t) {
    const made = [...this.run.first.values()].filter((u) => u <= t).length;
    const all = this.order === "standard";
    const weights = all ? step.P.filter((x) => x).length * N : 0;
    const squares = `<b>${made}</b> scores and <b>${weights}</b> weights kept`;
    write(this.kept, all ? squares : `<b>${step.parts.s}</b> of ${N * N} scores kept · standard: all`);
    const finished = upTo(N).filter((r) => step.O[r] && (this.order !== "fa1" || step.op === "done"));
    const apart = finished.flatMap((r) => step.O[r].map((x, e) => Math.abs(x - this.run.exact.O[r][e])));
    const text = `${finished.length} of ${N} rows done. O differs by `;
    write(this.result, finished.length ? `${text}<b>${Math.max(...apart).toFixed(3)}</b>` : "");
    write(this.names.o, step.op === "done" ? "O" : "o");
  }
}

const MEANINGS = { m: "max s", ℓ: "Σ p", o: "Σ p v", L: "m + log ℓ" };
const TITLES = {
  standard: "Standard attention: three kernels",
  fa1: "FlashAttention (FA1): keys outside",
  fa2: "FlashAttention-2 (FA2): queries outside",
};

const DRAG = "Press play, or step with ← and →. Drag any filled number up or down.";
const TASKS = {
  standard: DRAG,
  fa1: "Step through two column blocks, and follow m, ℓ and o of one query. They go to HBM and come back at every tile.",
  fa2: DRAG,
  both: "Step on, and follow o of one query. FA1 stores it after each tile, and FA2 once. Or write a sentence of your own.",
};

// From the settings to the run ----------------------------------------------------------------------------------------

/** Anew the boards that are shown, with their places. */
function build() {
  $("boards").replaceChildren();
  $("task").textContent = TASKS[set.order];
  document.querySelector(".algorithm").classList.toggle("both", set.order === "both");
  $("code-side").hidden = $("chip-side").hidden = set.order === "both";
  boards = (set.order === "both" ? ["fa1", "fa2"] : [set.order]).map((order) => new Board($("boards"), order));
  for (const board of boards) board.layout();
  showOne();
}

/** Run all three; `keep` stays at this step, else at the same share of the run. */
function prepare(keep = true) {
  const share = frames.length ? transport.t / (frames.length - 1) : 0;
  runs = Object.fromEntries(LOOPS.map(([order]) => [order, steps(data.q, data.k, data.v, { ...set, order, bias })]));
  for (const board of boards) {
    board.run = runs[board.order];
    Object.assign(board.run, { first: firstSeen(board.run), exact: dense(data.q, data.k, data.v, { ...set, bias }) });
    board.run.scale = scales(board.run);
  }
  frames = boards.length === 2 ? together(runs.fa1, runs.fa2) : boards[0].run.map((_, t) => [t]);
  transport.length(frames.length);
  if (!keep) transport.t = Math.round(share * transport.last);
}

/** The first step at which something shrinks; with both, at which FA2 does. */
function firstShrink() {
  const find = (good) => frames.findIndex((_, t) => good(stepOf(boards.at(-1), t)));
  const t = find(shrinks);
  return t < 0 ? find(({ op }) => ["add", "O"].includes(op)) : t;
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

/** The largest of everything that is drawn as a length or a tint; for ℓ and o, that of each row. */
function scales(run) {
  const seen = run.exact.S.flat().filter(Number.isFinite);
  const most = (r, onChip, stored) =>
    Math.max(...run.flatMap((x) => [(within(r, x.rows) && x[onChip]?.[r - x.rows[0]]) || 0, x[stored][r] || 0].flat().map(Math.abs)));
  return {
    low: Math.min(...seen),
    high: Math.max(...seen),
    l: upTo(N).map((r) => most(r, "l", "hbm_l") || 1),
    o: upTo(N).map((r) => most(r, "o", "O") || 1),
    held: held(run[0].order),
  };
}

/** The most numbers that a run holds on the chip. */
const held = (order) => Math.max(...runs[order].map((step) => step.held));

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

// Code and meter ------------------------------------------------------------------------------------------------------

function draw(t) {
  boards.forEach((board, n) => board.draw(frames[t][n]));
  const [step, row] = [stepOf(boards[0], t), focus(stepOf(boards[0], t))];
  transport.slider.setAttribute("aria-valuetext", `step ${t} of ${transport.last}: ${boards.at(-1).say.textContent}`);
  if (boards.length === 1) drawCode($("code"), step, row);
  drawMeter(step, t);
  $("undo").disabled = !bias && JSON.stringify(data) === JSON.stringify(clean);
  const { B_r, B_c, ...more } = set;
  const sizes = { br: B_r === 4 ? null : B_r, bc: B_c === 2 ? null : B_c };
  const numbers = { seed: words.length || seed === SEED ? null : seed, words: words.join(" "), shown: shown === "fa2" ? null : shown };
  if (!transport.timer) remember({ ...more, ...sizes, ...numbers, step: t });
}

const PAPERS = {
  standard: "",
  fa1: "Right: the lines of Algorithm 2 in the FA1 paper. ",
  fa2: "Right: the lines of Algorithm 1 in the FA2 paper. ",
};

/** The listing as list items; a line that runs at some step has a line of numbers below it. */
function writeCode(code, order) {
  code.order = order;
  code.replaceChildren();
  code.items = LISTING[order].map(([text, line, ops]) => {
    const item = add(code, "", "li");
    item.style.paddingLeft = `${10 + (18 * text.search(/\S/)) / 4}px`;
    const marked = text.trim().replace(/\|(.*?)\|/g, '<mark class="a">$1</mark>');
    item.innerHTML = marked.replace(/~(.*?)~/g, '<mark class="b">$1</mark>') + (line ? `<small>${line}</small>` : "");
    if (ops && order !== "standard" && ops !== "init") item.numbers = add(item, "", "span");
    return item;
  });
  $("code-title").textContent = TITLES[order];
}

function drawCode(code, step, row) {
  if (code.order !== step.order) writeCode(code, step.order);
  const numbers = values(step, row);
  code.items.forEach((item, n) => {
    const ops = LISTING[step.order][n][2].split(" ");
    const last = step.op === "done" && step.order !== "standard" && ops.includes("store"); // stays, with what the run has taken
    const now = ops.includes(step.op) || last;
    item.className = now ? `now ${step.op}` : "";
    if (now) item.setAttribute("aria-current", "step");
    else item.removeAttribute("aria-current");
    const all = last && `${step.moved} numbers moved, at most ${held(step.order)} on chip`;
    if (item.numbers) write(item.numbers, all || numbers[n] || "&nbsp;");
  });
  const whose = step.rows && step.order !== "standard" ? `Numbers: query ${row + 1}. ` : "";
  const where = "Q[i] is row block i, K[j] is column block j, and τ = 1/√2 = 0.71.";
  write($("code-note"), `${PAPERS[step.order]}${whose}${where}`);
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
  const share = t / transport.last;
  const shown = boards.map(({ order }) => order);
  const most = Math.max(...Object.values(runs).map((x) => x.at(-1).moved));
  for (const [order, e] of Object.entries(METERS)) {
    const all = runs[order].at(-1).moved;
    const at = shown.includes(order) ? frames[t][shown.indexOf(order)] : Math.round(share * (runs[order].length - 1));
    const [outline, fill] = e.querySelectorAll("i");
    e.classList.toggle("now", shown.includes(order));
    outline.style.width = `${(100 * all) / most}%`;
    fill.style.width = `${(100 * runs[order][at].moved) / most}%`;
    write(e.lastChild, `${runs[order][at].moved} of ${all}`);
  }
  const real = { N_q: 8192, N_k: 8192, B_r: 128, B_c: 128, causal: set.causal };
  const [one, two, three] = LOOPS.map(([order]) => Math.round(traffic(order, real, 64) / 1e6));
  const note = `Loads and stores, each at the same point of its own run. With such small tiles FA1 can need more than
    standard attention. At N = 8,192, d = 64 and tiles of 128 × 128 the three load and store ${one}, ${two} and ${three} million.`;
  write($("meter-note"), note);
  $("held").textContent = step.held;
  for (const [name, e] of Object.entries(PARTS)) {
    const x = step.parts[name];
    const letter = name === "l" ? "ℓ" : name === "s" && step.p ? "p" : name;
    e.style.width = `${(100 * x) / boards[0].run.scale.held}%`;
    write(e, x ? `${letter} ${x}` : "");
  }
  const parts = Object.entries(step.parts).filter(([, x]) => x);
  $("chip").setAttribute("aria-label", parts.map(([name, x]) => `${name}: ${x}`).join(", ") || "nothing");
}

// What the reader does ------------------------------------------------------------------------------------------------

form.oninput = ({ target }) => {
  if (target.id === "words") return;
  const said = new FormData(form);
  const other = said.get("order") !== set.order;
  set.order = said.get("order");
  set.B_r = Number(said.get("B_r")) || set.B_r;
  set.B_c = Number(said.get("B_c")) || set.B_c;
  set.causal = said.has("causal");
  transport.pause();
  if (other) build();
  prepare(false);
  sync();
  transport.show();
};

function sync() {
  mark(form, set);
  for (const name of ["B_r", "B_c"]) for (const e of form.elements[name]) e.disabled = set.order === "standard";
}

/** New numbers: those of the words, if there are any, else random ones. */
function fresh() {
  data = words.length ? numbersOf(words) : numbers(seed, few ? 6 : 8, d);
  N = data.q.length;
  clean = copy(data);
  [bias, chosen] = [null, null];
  build();
  prepare();
}

/** Whether a run shows something: o shrinks often and by much. */
function lively() {
  const factors = runs.fa2.filter((x) => x.op === "shrink").flatMap((x) => x.alpha);
  return factors.filter((x) => x > 0 && x < 0.7).length > N / 2;
}

$("fresh").onclick = () => {
  words = [];
  $("words").value = $("refused").textContent = "";
  for (let n = 0; n < 40; n++) {
    seed = Math.floor(Math.random() * 1e6);
    fresh();
    if (lively()) break;
  }
  transport.jump(firstShrink());
};
$("undo").onclick = () => {
  [data, bias] = [copy(clean), null];
  prepare();
  transport.show();
};
form.onsubmit = (e) => e.preventDefault(); // Enter takes the words, and the page stays
$("words").onchange = () => {
  const said = $("words").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const fine = said.length !== 1 && said.length <= 8;
  $("refused").textContent = fine ? "" : `Your sentence has ${said.length} ${said.length === 1 ? "word" : "words"}; the square takes 2 to 8.`; // prettier-ignore
  if (!fine) return;
  words = said;
  if (words.length) Object.assign(set, { causal: true, B_c: 1 }); // a word sees those before it
  fresh();
  sync();
  transport.jump(firstShrink());
};

/** An entry of q, k or v is changed itself; to a score something is added. */
const product = ({ a, b }) => dot(data.q[a], data.k[b]) / Math.sqrt(d);
const value = (at) => (at.kind === "s" ? product(at) + (bias ? bias[at.a][at.b] : 0) : data[at.kind][at.a][at.b]);

/** The sentences stay with the row that the reader changes. */
function choose({ kind, a }, board) {
  if (["s", "q"].includes(kind)) chosen = a - stepOf(board, transport.t).rows[0];
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

function press(e, board) {
  const change = { ArrowUp: 0.1, ArrowDown: -0.1 }[e.key];
  if (!e.target.at || !change) return;
  e.preventDefault();
  choose(e.target.at, board);
  nudge(e.target.at, value(e.target.at) + change);
}

function drag(e, board) {
  const cell = e.target.closest(".cell");
  if (!cell || !cell.classList.contains("grab")) return;
  e.preventDefault();
  transport.pause();
  cell.setPointerCapture(e.pointerId);
  cell.classList.add("held");
  const start = { y: e.clientY, x: value(cell.at) };
  choose(cell.at, board);
  cell.onpointermove = (f) => nudge(cell.at, start.x + (start.y - f.clientY) / 40);
  cell.onpointerup = cell.onpointercancel = () => {
    cell.onpointermove = null;
    cell.classList.remove("held");
  };
  transport.show();
}

words = (ask.get("words") || "").split(" ").filter(Boolean).slice(0, 8);
if (words.length === 1) words = [];
$("words").value = words.join(" ");
fresh();
sync();
transport.jump(ask.has("step") ? Number(ask.get("step")) : firstShrink());
onWidth(document.querySelector(".algorithm"), () => {
  for (const board of boards) board.layout();
  transport.show();
});
