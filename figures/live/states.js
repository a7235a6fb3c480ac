/* What the live pieces show, as pure functions: numbers in, plain objects out. Drawing is elsewhere.
   A classic script, so that it runs from file://; node takes the same file with require(). */
"use strict";

const cdiv = (a, b) => Math.ceil(a / b);
const sum = (a) => a.reduce((x, y) => x + y, 0);
const dot = (a, b) => a.reduce((s, x, n) => s + x * b[n], 0);
const upTo = (n) => Array.from({ length: n }, (_, i) => i);
const finite = (m) => (m === -Infinity ? 0 : m); // exp(−∞ − 0) is 0, exp(−∞ − −∞) would be NaN
const times = (p, v) => p.map((row) => v[0].map((_, e) => sum(row.map((x, c) => x * v[c][e])))); // p @ v
const size = (x) => (x == null ? 0 : Array.isArray(x) ? sum(x.map(size)) : 1);
const total = (counts) => sum(Object.values(counts));

function copy(x) {
  if (Array.isArray(x)) return x.map(copy);
  if (x && typeof x === "object") return Object.fromEntries(Object.entries(x).map(([name, y]) => [name, copy(y)]));
  return x;
}

/** A whole number from low to high, or an error that names it, what it got and by how much it misses. */
function whole(name, x, low, high) {
  const takes = `it takes a whole number from ${low.toLocaleString("en")} to ${high.toLocaleString("en")}`;
  if (!Number.isInteger(x)) throw new RangeError(`${name}: got ${Number.isNaN(x) ? "nothing" : x}; ${takes}`);
  const miss = x < low ? `${low - x} too small` : x > high ? `${(x - high).toLocaleString("en")} too large` : "";
  if (miss) throw new RangeError(`${name}: ${x.toLocaleString("en")} is ${miss}; ${takes}`);
  return x;
}

// Tiles ---------------------------------------------------------------------------------------------------------------

/** How many keys query r sees: the causal diagonal ends in the bottom right corner. */
function keysSeen(r, N_q, N_k, causal) {
  return causal ? Math.min(Math.max(r + 1 + N_k - N_q, 0), N_k) : N_k;
}

/** How many column blocks row block i visits: with a causal mask, those up to its last row's last key. */
function visited(i, { N_q, N_k, B_r, B_c, causal }) {
  const bottom = Math.min((i + 1) * B_r, N_q) - 1;
  return cdiv(keysSeen(bottom, N_q, N_k, causal), B_c);
}

/** Keys that the column blocks have which row block i visits. */
function keysLoaded(i, tiling) {
  return Math.min(visited(i, tiling) * tiling.B_c, tiling.N_k);
}

/** What one head requests in the forward, tensor by tensor: elements that are loaded, and that are stored. */
function requests(algorithm, tiling, d) {
  const { N_q, N_k, B_r, B_c } = tiling;
  const [q, k, s, T_c] = [N_q * d, N_k * d, N_q * N_k, cdiv(N_k, B_c)];
  if (algorithm === "standard") return { loads: { Q: q, K: k, S: s, P: s, V: k }, stores: { S: s, P: s, O: q } };
  if (algorithm === "fa1") {
    const [each, more] = [T_c * N_q, (T_c + 1) * N_q];
    return { loads: { K: k, V: k, Q: T_c * q, O: T_c * q, l: each, m: each }, stores: { O: more * d, l: more, m: more } };
  }
  const keys = sum(upTo(cdiv(N_q, B_r)).map((i) => keysLoaded(i, tiling))) * d;
  return { loads: { Q: q, K: keys, V: keys }, stores: { O: q, L: N_q } };
}

/** All of these elements. */
function traffic(algorithm, tiling, d) {
  const { loads, stores } = requests(algorithm, tiling, d);
  return total(loads) + total(stores);
}

const GEMM_TILE = 128; // a product of standard attention loads its operands once for each such tile of its result
const FOUR = { standard: "S", fa1: "Olm", fa2: "L" }; // tensors with four bytes for a number; all others have two

/** Bytes that the heads request, and those that reach DRAM: what L2 keeps is loaded from there once. */
function bytesMoved(algorithm, tiling, d, heads, chip) {
  const { loads, stores } = requests(algorithm, tiling, d);
  const { N_q, N_k, B_r, B_c } = tiling;
  const size = { Q: N_q * d, O: N_q * d, K: N_k * d, V: N_k * d, S: N_q * N_k, P: N_q * N_k, l: N_q, m: N_q, L: N_q };
  const bytes = (part) => sum(Object.entries(part).map(([t, n]) => n * (FOUR[algorithm].includes(t) ? 4 : 2)));
  const again = Object.fromEntries(Object.entries(loads).flatMap(([t, n]) => (n > size[t] ? [[t, size[t]]] : [])));
  const workers = { standard: chip.SMs, fa1: 1, fa2: cdiv(N_q, B_r) }[algorithm];
  const atOnce = algorithm === "standard" ? heads : Math.min(heads, cdiv(chip.SMs, workers));
  const often = algorithm === "fa2" ? cdiv(workers, chip.SMs) : Math.max(cdiv(N_k, B_c), 2);
  const passes = atOnce * bytes(again) <= chip.l2_bytes ? 1 : often;
  const least = (part) => Object.fromEntries(Object.entries(part).map(([t, n]) => [t, Math.min(n, passes * size[t])]));
  const tiles = (n) => cdiv(n, GEMM_TILE) - 1; // of the result, beyond the first
  const more = { Q: tiles(N_k) * size.Q, K: tiles(N_q) * size.K, P: tiles(d) * size.P, V: tiles(N_q) * size.V };
  const asked = bytes(loads) + bytes(stores) + (algorithm === "standard" ? bytes(more) : 0);
  return { requested: heads * asked, dram: heads * (bytes(least(loads)) + bytes(least(stores))) };
}

// Algorithm 1 ---------------------------------------------------------------------------------------------------------

/** The score of query r and key c: τ q·k, plus what the reader dragged; −∞ where the mask hides it. */
function score(q, k, r, c, { causal, bias }) {
  if (c >= keysSeen(r, q.length, k.length, causal)) return -Infinity;
  return dot(q[r], k[c]) / Math.sqrt(q[r].length) + (bias ? bias[r][c] : 0);
}

/** Attention as it is defined: the whole square, then softmax, then the product. */
function dense(q, k, v, options = {}) {
  const S = q.map((_, r) => k.map((_, c) => score(q, k, r, c, options)));
  const P = S.map((row) => {
    const m = finite(Math.max(...row));
    const e = row.map((s) => Math.exp(s - m));
    const l = sum(e) || 1;
    return e.map((x) => x / l);
  });
  return { S, P, O: times(P, v) };
}

/** One run of an algorithm: what is on chip and in HBM, what was moved, and a snapshot after each step. */
class Run {
  constructor(q, k, v, { order, B_r, B_c, causal, bias }) {
    Object.assign(this, { Q: q, K: k, V: v, order, B_r, B_c, causal, bias, N_q: q.length, N_k: k.length });
    const empty = () => q.map(() => null);
    this.chip = { q: null, k: null, v: null, s: null, p: null, m: null, l: null, o: null, alpha: null, beta: null };
    this.hbm = { O: empty(), L: empty(), hbm_l: empty(), hbm_m: empty() };
    if (order === "standard") Object.assign(this.hbm, { S: empty(), P: empty() });
    Object.assign(this, { loads: {}, stores: {}, tile: {}, steps: [] });
    this.at = { i: null, j: null, rows: null, cols: null };
  }

  load(name, n) {
    this.loads[name] = (this.loads[name] || 0) + n;
  }

  store(name, n) {
    this.stores[name] = (this.stores[name] || 0) + n;
  }

  /** Go to row block i, or out of the rows with null; the same for columns. */
  rows(i) {
    Object.assign(this.at, { i, rows: i === null ? null : [i * this.B_r, Math.min((i + 1) * this.B_r, this.N_q)] });
  }

  cols(j) {
    Object.assign(this.at, { j, cols: j === null ? null : [j * this.B_c, Math.min((j + 1) * this.B_c, this.N_k)] });
  }

  /** Keep a snapshot; `extra` is what this tile has computed beside what is on chip. */
  emit(op, extra) {
    const { q, k, v, s, p, m, l, o } = this.chip;
    const parts = { q: size(q), k: size(k), v: size(v), o: size(o), m: size(m), l: size(l), s: size(s || p) };
    Object.assign(this.tile, extra);
    const { order, at, loads, stores } = this;
    const seen = copy({ ...this.chip, ...this.hbm, ...this.tile, loads, stores, parts });
    this.steps.push({ op, order, ...at, ...seen, held: total(parts), moved: total(loads) + total(stores) });
  }

  clear(...names) {
    this.tile = {};
    for (const n of names) this.chip[n] = null;
  }

  loadKeys() {
    this.chip.k = this.K.slice(...this.at.cols);
    this.chip.v = this.V.slice(...this.at.cols);
    this.load("K", size(this.chip.k));
    this.load("V", size(this.chip.v));
    this.emit("kv");
  }

  loadQueries() {
    this.chip.q = this.Q.slice(...this.at.rows);
    this.load("Q", size(this.chip.q));
  }

  tileScores() {
    const [r, c] = [this.at.rows[0], this.at.cols[0]];
    const { chip, Q, K } = this;
    chip.s = chip.q.map((_, a) => chip.k.map((_, b) => score(Q, K, r + a, c + b, this)));
    this.emit("s");
  }

  /** The two halves of the update: o and l shrink by their factors, then the tile's own part is added. */
  update(l_factor, factor, l_gain, o_gain) {
    const { chip } = this;
    const was = { o: chip.o, l: chip.l };
    chip.l = was.l.map((l, a) => l_factor[a] * l);
    chip.o = was.o.map((o, a) => o.map((x) => factor[a] * x));
    this.emit("shrink", { was, factor });
    const shrunk = { o: chip.o, l: chip.l };
    chip.l = chip.l.map((l, a) => l + l_gain[a]);
    chip.o = chip.o.map((o, a) => o.map((x, e) => x + o_gain[a][e]));
    this.emit("add", { was: shrunk, gain: { o: o_gain, l: l_gain } });
  }
}

/** FlashAttention-2's Algorithm 1; the numbers are the paper's lines. */
function fa2(run) {
  const { chip, at, hbm } = run;
  for (let i = 0; i < cdiv(run.N_q, run.B_r); i++) {
    // 3
    run.rows(i);
    run.loadQueries(); // 4
    const zero = chip.q.map((row) => row.map(() => 0));
    Object.assign(chip, { o: zero, l: chip.q.map(() => 0), m: chip.q.map(() => -Infinity) }); // 5
    run.emit("q");
    for (let j = 0; j < visited(i, run); j++) {
      // 6
      run.cols(j);
      run.loadKeys(); // 7
      run.tileScores(); // 8
      const before = chip.m;
      chip.m = before.map((m, a) => Math.max(m, ...chip.s[a])); // 9
      run.emit("max", { before, was: { m: before } });
      chip.p = chip.s.map((row, a) => row.map((x) => Math.exp(x - finite(chip.m[a])))); // 9
      chip.alpha = before.map((m, a) => Math.exp(m - finite(chip.m[a]))); // 9
      run.emit("p");
      run.update(chip.alpha, chip.alpha, chip.p.map(sum), times(chip.p, chip.v)); // 9, 10
      run.clear("s", "p", "alpha", "k", "v");
    }
    run.cols(null);
    const was = { o: chip.o, l: chip.l };
    const safe = chip.l.map((l) => l || 1); // a row that has seen no key divides by 1
    chip.o = chip.o.map((o, a) => o.map((x) => x / safe[a])); // 12
    const L_i = chip.m.map((m, a) => m + Math.log(safe[a])); // 13
    run.emit("end", { was, L_i });
    chip.o.forEach((o, a) => {
      hbm.O[at.rows[0] + a] = o;
    }); // 14
    L_i.forEach((L, a) => {
      hbm.L[at.rows[0] + a] = L;
    }); // 15
    run.store("O", size(chip.o));
    run.store("L", L_i.length);
    run.clear("q", "o", "l", "m");
    run.emit("store");
  }
}

const FA1_STATE = [
  ["o", "O", "O"],
  ["l", "hbm_l", "l"],
  ["m", "hbm_m", "m"],
]; // on chip, in HBM, as counted

/** FlashAttention's Algorithm 2 (FA1): keys outside, and o, ℓ and m travel at every tile. */
function fa1(run) {
  const { chip, at, hbm } = run;
  run.Q.forEach((row, r) => {
    hbm.O[r] = row.map(() => 0);
    hbm.hbm_l[r] = 0;
    hbm.hbm_m[r] = -Infinity;
  }); // 3
  run.store("O", size(hbm.O));
  run.store("l", run.N_q);
  run.store("m", run.N_q);
  run.emit("init");
  for (let j = 0; j < cdiv(run.N_k, run.B_c); j++) {
    // 6
    run.rows(null);
    run.cols(j);
    run.loadKeys(); // 7
    for (let i = 0; i < cdiv(run.N_q, run.B_r); i++) {
      // 8
      run.rows(i);
      run.loadQueries();
      for (const [n, place, name] of FA1_STATE) {
        // 9
        chip[n] = hbm[place].slice(...at.rows);
        run.load(name, size(chip[n]));
      }
      run.emit("q", { came: { ...chip } });
      run.tileScores(); // 10, 11
      const own = chip.s.map((row) => Math.max(...row));
      const [before, old] = [chip.m, chip.l];
      chip.p = chip.s.map((row, a) => row.map((x) => Math.exp(x - finite(own[a])))); // 12
      run.emit("p", { own });
      chip.m = before.map((m, a) => Math.max(m, own[a])); // 13
      chip.alpha = before.map((m, a) => Math.exp(m - finite(chip.m[a])));
      chip.beta = own.map((m, a) => Math.exp(m - finite(chip.m[a])));
      run.emit("max", { before, was: { m: before } });
      const l_gain = chip.p.map((row, a) => chip.beta[a] * sum(row));
      const share = old.map((l, a) => 1 / (chip.alpha[a] * l + l_gain[a] || 1)); // 1 / ℓ_new
      const factor = old.map((l, a) => share[a] * chip.alpha[a] * l);
      const o_gain = times(chip.p, chip.v).map((o, a) => o.map((x) => share[a] * chip.beta[a] * x));
      run.update(chip.alpha, factor, l_gain, o_gain); // 13, 15
      for (const [n, place, name] of FA1_STATE) {
        // 15, 16
        chip[n].forEach((x, a) => {
          hbm[place][at.rows[0] + a] = x;
        });
        run.store(name, size(chip[n]));
      }
      run.clear("q", "o", "l", "m", "s", "p", "alpha", "beta");
      run.emit("store");
    }
    run.clear("k", "v");
  }
}

/** Standard attention: three kernels. Each loads what it shares once, and goes through the rows. */
function standard(run) {
  const { chip, hbm, Q, K, V } = run;
  const whole = dense(Q, K, V, run);
  run.B_r = 1; // a row at a time
  const kernel = (op, read, write) => {
    for (let r = 0; r < run.N_q; r++) {
      run.rows(r);
      const from = read === "Q" ? Q[r] : hbm[read][r];
      chip[read.toLowerCase()] = [from];
      run.load(read, from.length);
      hbm[write][r] = whole[write][r];
      if (write !== "P") chip[write.toLowerCase()] = [whole[write][r]];
      run.store(write, whole[write][r].length);
      run.emit(op);
    }
  };
  chip.k = K;
  run.load("K", size(K));
  kernel("S", "Q", "S");
  run.clear("k", "q");
  kernel("P", "S", "P");
  Object.assign(chip, { v: V, s: null });
  run.load("V", size(V));
  kernel("O", "P", "O");
  run.clear("v", "p", "o");
}

/** The steps of a run. q: N_q rows, k and v: N_k rows, all of length d. */
function steps(q, k, v, { order = "fa2", B_r = 2, B_c = 2, causal = false, bias = null } = {}) {
  const run = new Run(q, k, v, { order, B_r, B_c, causal, bias });
  run.emit("start");
  ({ fa2, fa1, standard })[order](run);
  run.rows(null);
  run.cols(null);
  run.clear("k", "v");
  const exact = dense(q, k, v, { causal, bias }).O;
  const apart = run.hbm.O.flatMap((o, r) => o.map((x, e) => Math.abs(x - exact[r][e])));
  run.emit("done", { difference: Math.max(...apart) });
  return run.steps;
}

/** Numbers from 0 to 1: mulberry32, a seed, no other state. */
function random(seed) {
  let a = seed >>> 0;
  return () => {
    a += 0x6d2b79f5;
    let t = Math.imul(a ^ (a >>> 15), a | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

/** Small numbers with one decimal, so that a reader can check a product. */
function numbers(seed, N = 8, d = 2) {
  const uniform = random(seed);
  const one = (scale) => Math.round(20 * scale * (uniform() - 0.5)) / 10;
  const matrix = (scale) => upTo(N).map(() => upTo(d).map(() => one(scale)));
  return { q: matrix(1.9), k: matrix(1.9), v: matrix(1) };
}

/** The numbers of a sentence: each word is a direction. A query has its word's, a key that of the word before, a value
    its word's. So a word that was seen before looks at what followed it then, as in chapter 01's map. */
function numbersOf(words) {
  const known = [...new Set(words)];
  const direction = (word, length) => {
    const angle = (2 * Math.PI * known.indexOf(word)) / known.length;
    return [Math.cos, Math.sin].map((f) => (word === undefined ? 0 : Math.round(10 * length * f(angle)) / 10));
  };
  return {
    q: words.map((word) => direction(word, 2.4)),
    k: words.map((_, n) => direction(words[n - 1], 2.4)),
    v: words.map((word) => direction(word, 1)),
  };
}

/** Two runs side by side, as pairs of their steps: both end their n-th tile at the same time, and who is done waits. */
function together(one, two) {
  const tiles = (run) => {
    const parts = [[]];
    run.forEach(({ op }, t) => {
      parts.at(-1).push(t);
      if (op === "add") parts.push([]);
    });
    return parts;
  };
  const [a, b] = [tiles(one), tiles(two)];
  return upTo(Math.max(a.length, b.length)).flatMap((n) => {
    const [x, y] = [a[n] || [one.length - 1], b[n] || [two.length - 1]];
    const most = Math.max(x.length, y.length);
    return upTo(most).map((k) => [x, y].map((part) => part[Math.max(0, k - most + part.length)]));
  });
}

// A row that arrives in blocks (online softmax) -----------------------------------------------------------------------

/** Blocks of at most B keys, in one of the orders in which a row can be read. */
function keyBlocks(order, N, B) {
  const blocks = upTo(cdiv(N, B)).map((j) => upTo(N).slice(j * B, (j + 1) * B));
  if (order === "backward") return blocks.reverse();
  if (order === "outside in") return blocks.map((_, n) => blocks[n % 2 ? blocks.length - 1 - (n >> 1) : n >> 1]);
  return blocks;
}

/** One row in blocks: m, ℓ and o after each step, and what every key seen so far weighs. A hidden key has −∞. */
function online(scores, values, blocks) {
  const d = values[0].length;
  let state = { m: -Infinity, l: 0, o: Array(d).fill(0), weights: scores.map(() => null) };
  const out = [{ op: "start", block: [], alpha: 1, ...copy(state) }];
  for (const block of blocks) {
    const m = Math.max(state.m, ...block.map((c) => scores[c]));
    const alpha = Math.exp(state.m - finite(m));
    const rises = m > state.m && state.m > -Infinity;
    const weights = state.weights.map((w) => (w === null ? null : alpha * w));
    state = { m, l: alpha * state.l, o: state.o.map((x) => alpha * x), weights };
    out.push({ op: "shrink", block, alpha, rises, before: out.at(-1).m, ...copy(state) });
    for (const c of block) {
      const p = Math.exp(scores[c] - finite(m));
      state.weights[c] = p;
      state.l += p;
      state.o = state.o.map((x, e) => x + p * values[c][e]);
    }
    out.push({ op: "add", block, alpha, rises, ...copy(state) });
  }
  const safe = state.l || 1; // a row that has seen no key divides by 1
  const divided = {
    m: state.m,
    l: state.l,
    o: state.o.map((x) => x / safe),
    weights: state.weights.map((w) => w / safe),
  };
  out.push({ op: "end", block: [], alpha: 1, ...divided, L: state.m + Math.log(safe) });
  return out;
}

// Does a tile fit, and what does it cost? -----------------------------------------------------------------------------

const KiB = 1024;
const FIXED_REGISTERS = 40; // a thread's addresses, loop counters, m and ℓ
const RESERVED = KiB; // shared memory that the system takes for each program

/** Registers that a thread can have when a program of so many warps is to fit on an SM at all. */
function registerLimit(chip, warps) {
  return Math.min(chip.registers_per_thread, Math.floor(chip.registers_per_sm / (32 * warps) / 8) * 8);
}

/** Programs of this size on an SM at once: the scarcest of four things decides. */
function programsPerSM(chip, shared, registers, warps) {
  const of = {
    "thread blocks": chip.blocks_per_sm,
    warps: Math.floor(chip.warps_per_sm / warps),
    "shared memory": Math.floor(chip.shared_per_sm / (shared + RESERVED)),
    registers: Math.floor(chip.registers_per_sm / (cdiv(registers, 8) * 8 * 32 * warps)),
  };
  const most = Math.min(...Object.values(of));
  return { most, by: Object.keys(of).find((name) => of[name] === most) };
}

/** Whether a forward tile fits on the chip, how many programs an SM holds, and if it does not fit, by how much.
    `compiled` is [registers, spill instructions] of the kernel, if it was compiled: else registers are a sum. */
function fits(chip, { B_r, B_c, d, stages = 2, warps = 4 }, compiled = null, itemsize = 2) {
  const parts = { q: B_r * d * itemsize, k: stages * B_c * d * itemsize, v: stages * B_c * d * itemsize };
  const operand = cdiv(B_r * B_c * itemsize, 4); // p as 16-bit operand of the next product
  const shared = total(parts);
  const counted = FIXED_REGISTERS + cdiv(B_r * d + B_r * B_c + operand, 32 * warps);
  const limit = registerLimit(chip, warps);
  const [registers, spills] = compiled || [counted, Math.max(0, counted - limit)];
  const { most, by } = programsPerSM(chip, shared, Math.min(registers, limit), warps);
  const found = { parts, shared, counted, registers, spills, limit, perSM: most, by, ok: true, scarce: "", over: 0 };
  if (shared > chip.shared_per_block)
    return { ...found, ok: false, perSM: 0, scarce: "shared memory", over: shared - chip.shared_per_block };
  if (spills) return { ...found, ok: false, scarce: "registers", over: spills };
  return found;
}

const SIZES = { N: [1, 1048576], d: [1, 512], B_r: [1, 1024], B_c: [1, 1024], heads: [1, 4096] };

/** Everything that follows from the sizes: traffic of all heads, memory on chip, programs and waves. */
function plan(chip, settings, compiled = null) {
  for (const [name, [low, high]] of Object.entries(SIZES)) whole(name, settings[name], low, high);
  const { N, d, B_r, B_c, heads, causal } = settings;
  const tiling = { N_q: N, N_k: N, B_r, B_c, causal };
  const fit = fits(chip, settings, compiled);
  const moved = {};
  for (const a of ["standard", "fa1", "fa2"]) moved[a] = bytesMoved(a, tiling, d, heads, chip);
  const programs = heads * cdiv(N, B_r);
  const slots = chip.SMs * fit.perSM;
  const waves = slots ? cdiv(programs, slots) : 0;
  const busy = waves ? programs / (waves * slots) : 0;
  const pairs = sum(upTo(cdiv(N, B_r)).map((i) => Math.min(B_r, N - i * B_r) * keysLoaded(i, tiling)));
  const flops = heads * 4 * pairs * d;
  const winner = Object.keys(moved).reduce((a, b) => (moved[b].requested < moved[a].requested ? b : a));
  return { ...fit, moved, programs, slots, waves, busy, flops, winner, fa1Programs: heads };
}

// Who works where and when --------------------------------------------------------------------------------------------

/** The tiles of each worker: row blocks forward, column blocks backward. */
function workerTiles(tiling, direction = "forward") {
  const rows = upTo(cdiv(tiling.N_q, tiling.B_r)).map((i) => visited(i, tiling));
  if (direction === "forward") return rows;
  return upTo(cdiv(tiling.N_k, tiling.B_c)).map((j) => rows.filter((n) => n > j).length);
}

/** The programs in launch order: { head, index, cost in tiles }. FA1 has one for each head, and skips no tile. */
function programs(heads, tiling, { algorithm = "fa2", direction = "forward", order = "rows" } = {}) {
  const all = cdiv(tiling.N_q, tiling.B_r) * cdiv(tiling.N_k, tiling.B_c);
  if (algorithm === "fa1") return upTo(heads).map((head) => ({ head, index: null, cost: all }));
  const costs = workerTiles(tiling, direction);
  const list = upTo(heads).flatMap((head) => costs.map((cost, index) => ({ head, index, cost })));
  return order === "rows" ? list : list.sort((a, b) => b.cost - a.cost);
}

/** Programs on SMs in launch order: each takes the place that is free first, SMs in turn before second places. */
function timetable(list, SMs, perSM = 1) {
  const free = upTo(perSM).flatMap((slot) => upTo(SMs).map((SM) => ({ time: 0, slot, SM })));
  const placed = list.map((program) => {
    let first = free[0];
    for (const place of free) if (place.time < first.time) first = place; // among equals the lower slot, then SM
    const start = first.time;
    first.time += program.cost;
    return { ...program, SM: first.SM, slot: first.slot, start, end: first.time };
  });
  const makespan = Math.max(...placed.map((p) => p.end));
  const work = sum(placed.map((p) => p.cost));
  const busy = work ? work / (SMs * perSM * makespan) : 0;
  return { placed, makespan, busy, waves: cdiv(list.length, SMs * perSM), used: new Set(placed.map((p) => p.SM)).size };
}

// The backward, block by block ----------------------------------------------------------------------------------------

/** The backward as steps in which all workers take one tile each. In one pass column workers add to dQ; in two
    passes columns keep dK and dV, then rows keep dQ. A step has `at`, its tiles, and `meet`, {row block: workers}. */
function backward(tiling, passes = 1) {
  const T_r = cdiv(tiling.N_q, tiling.B_r);
  const T_c = cdiv(tiling.N_k, tiling.B_c);
  const sees = (i, j) => j < visited(i, tiling);
  const columns = upTo(T_c).map((j) =>
    upTo(T_r)
      .filter((i) => sees(i, j))
      .map((i) => ({ i, j, worker: j })),
  );
  const rows = upTo(T_r).map((i) =>
    upTo(T_c)
      .filter((j) => sees(i, j))
      .map((j) => ({ i, j, worker: i })),
  );
  const added = Array(T_r).fill(0);
  const out = [{ op: "start", pass: 0, at: [], meet: {}, added: [...added], products: 0 }];
  let products = 0;
  const run = (work, pass, each, adds) => {
    for (let t = 0; t < Math.max(0, ...work.map((tiles) => tiles.length)); t++) {
      const at = work.flatMap((tiles) => tiles.slice(t, t + 1));
      const writers = {};
      for (const { i, worker } of adds ? at : []) {
        (writers[i] ||= []).push(worker);
        added[i] += 1;
      }
      products += each * at.length;
      const meet = Object.fromEntries(Object.entries(writers).filter(([, workers]) => workers.length > 1));
      out.push({ op: "tile", pass, t, at, writers, meet, added: [...added], products });
    }
  };
  run(columns, 1, passes === 1 ? 5 : 4, passes === 1);
  if (passes === 2) run(rows, 2, 3, true);
  const collisions = sum(out.map(({ meet }) => sum(Object.values(meet).map((workers) => workers.length - 1))));
  out.push({ op: "done", pass: 0, at: [], meet: {}, added: [...added], products, collisions });
  return out;
}

/** Both ways to add up dQ over time, counted in products of a tile: one pass with atomic adds, and two passes. A write
    has its block i, its time, and its workers in the order in which they add; `seed` draws that order. A block of dQ is
    a single float32 here, the sum of a part for each tile. */
function race(tiling, seed) {
  const [T_r, T_c] = [cdiv(tiling.N_q, tiling.B_r), cdiv(tiling.N_k, tiling.B_c)];
  const rows = upTo(T_r).map((i) => upTo(visited(i, tiling)));
  const columns = upTo(T_c).map((j) => upTo(T_r).filter((i) => rows[i].includes(j)));
  const [part, draw] = [random(5), random(seed)];
  const parts = upTo(T_r).map(() => upTo(T_c).map(() => Math.fround(8 * (part() - 0.5))));
  const visits = (work, each, begin, block) =>
    work.flatMap((tiles, worker) =>
      tiles.map((tile, k) => ({ worker, from: begin + each * k, to: begin + each * (k + 1), i: block(worker, tile) })),
    );
  const atomics = visits(columns, 5, 0, (_, i) => i);
  const together = {};
  for (const visit of atomics) (together[`${visit.i} ${visit.to}`] ||= []).push(visit);
  const shuffled = (workers) => workers.map((w) => [draw(), w]).sort((a, b) => a[0] - b[0]).map(([, w]) => w); // prettier-ignore
  const adds = Object.values(together).map((some) => {
    return { i: some[0].i, time: some[0].to, workers: shuffled(some.map(({ worker }) => worker)) };
  });
  const begin = 4 * Math.max(...columns.map((tiles) => tiles.length));
  const both = [...visits(columns, 4, 0, () => null), ...visits(rows, 3, begin, (i) => i)];
  const stores = upTo(T_r).map((i) => ({ i, time: begin + 3 * rows[i].length, workers: [i] }));
  const inOrder = (some) => some.reduce((x, y) => Math.fround(x + y), 0);
  const added = (i) => adds.filter((add) => add.i === i).sort((a, b) => a.time - b.time).flatMap(({ workers }) => workers); // prettier-ignore
  const last = (all) => Math.max(...all.map(({ to }) => to));
  const sums = (order) => upTo(T_r).map((i) => inOrder(order(i).map((j) => parts[i][j])));
  return [
    { visits: atomics, writes: adds, end: last(atomics), sums: sums(added) },
    { visits: both, writes: stores, end: last(both), sums: sums((i) => rows[i]) },
  ];
}

// The words beside Algorithm 1 ----------------------------------------------------------------------------------------

/** A number with its minus sign and so many decimals; −∞ and −0 as a reader writes them. */
function show(x, digits = 2) {
  if (x === -Infinity) return "−∞";
  const text = (x < 0 ? -x : x).toFixed(digits); // throws if x is no number
  return x < 0 && Number(text) ? `−${text}` : text;
}

/** The fewest digits, at least 2 or 3, with which an equation holds as it is printed. `holds` takes the rounding. */
const enough = (least, holds) => [least, 4, 5].find((digits) => holds((x) => Number(x.toFixed(digits)))) ?? 6;

/** α = e^(before − m), in digits from which the printed α follows. */
function power(before, m, alpha) {
  const digits = enough(2, (r) => Math.exp(r(before) - r(m)).toFixed(3) === alpha.toFixed(3));
  return `e^(${show(before, digits)}\u00a0−\u00a0${show(m, digits).replace(/^(−.*)$/, "($1)")})\u00a0=\u00a0${show(alpha, 3)}`;
}

/** factor · x for a number or a row, in digits from which what the cells show follows. */
function shrunk(factor, x) {
  const digits = enough(3, (r) => [x].flat().every((y) => show(r(factor) * r(y)) === show(factor * y)));
  return `${show(factor, digits)} · ${Array.isArray(x) ? list(x, digits) : show(x, digits)}`;
}

/** A row of numbers; of a long one the first three. */
function list(a, digits = 2) {
  const shown = a.slice(0, a.length > 4 ? 3 : 4).map((x) => show(x, digits));
  return `(${[...shown, ...(a.length > 4 ? ["…"] : [])].join(", ")})`;
}

const range = ([a, b]) => (b - a === 1 ? `${a + 1}` : `${a + 1}–${b}`);

/** What happens in this step, in a sentence; `row` is the query that is told about. */
function say(step, row, { N_q, N_k, B_r, B_c }) {
  const a = step.rows ? row - step.rows[0] : 0,
    fa1 = step.order === "fa1";
  const rows = step.rows && (step.rows[1] - step.rows[0] > 1 ? "queries " : "query ") + range(step.rows);
  switch (step.op) {
    case "start":
      return "Q, K and V are in the GPU’s large memory, HBM. The chip is still empty.";
    case "init":
      return "FA1 begins by writing O = 0, ℓ = 0 and m = −∞ into HBM, for all queries.";
    case "q":
      return fa1
        ? `Load ${rows}, and with them what they have summed so far: o, ℓ and m come back from HBM.`
        : `Load ${rows}. They have seen no key yet: o = 0, ℓ = 0 and m = −∞.`;
    case "kv":
      return `Load keys and values ${range(step.cols)}.` + (fa1 ? " They stay while all queries come and go." : "");
    case "s":
      return `Each query times each key: a tile of ${step.s.length} × ${step.s[0].length} scores. It exists only on the chip.`;
    case "p":
      return fa1
        ? `p = e^(s − m_j) are the weights, measured against this tile’s own largest score, ${show(step.own[a])} for query ${row + 1}.`
        : `p = e^(s − m) are the weights of this tile, measured against the row’s largest score so far.`;
    case "max":
      return step.before[a] === step.m[a]
        ? `Query ${row + 1}: no score of this tile is larger than ${show(step.m[a])}. m stays.`
        : step.before[a] === -Infinity
          ? `Query ${row + 1}: its largest score so far is ${show(step.m[a])}.`
          : `Query ${row + 1}: a larger score has come. m rises from ${show(step.before[a])} to ${show(step.m[a])}.`;
    case "shrink":
      if (fa1)
        return `The old answer gets its share of the new one: o of query ${row + 1} is multiplied by α ℓ / ℓ_new = ${show(step.factor[a], 3)}.`;
      return step.before[a] === -Infinity
        ? "Nothing is summed yet, so nothing shrinks: 0 stays 0."
        : step.alpha[a] < 1
          ? `Query ${row + 1} was measured against ${show(step.before[a])}, and now against ${show(step.m[a])}. So o and ℓ shrink: α\u00a0=\u00a0${power(step.before[a], step.m[a], step.alpha[a])}.`
          : `Query ${row + 1} has the same m as before: α = 1, so o and ℓ keep their size.`;
    case "add":
      return fa1
        ? "Add this tile’s share. Now o is a finished answer for the keys seen so far."
        : "Add this tile: ℓ gains the sum of p, and o gains p v. Now the scores can go.";
    case "end":
      return "All keys are seen. One division per row makes o / ℓ, the answer. L = m + log ℓ is kept for the backward pass.";
    case "store":
      return fa1
        ? `Store o, ℓ and m of ${rows} in HBM, until the next keys come.`
        : `Store the finished rows of O for ${rows}. Their scores are gone, and no later step needs them.`;
    case "S":
      return `Kernel 1 computes the scores of query ${step.rows[0] + 1} with all keys, and stores them in HBM.`;
    case "P":
      return `Kernel 2 computes the softmax of row ${step.rows[0] + 1}. It reads S from HBM and stores P there.`;
    case "O":
      return `Kernel 3 computes row ${step.rows[0] + 1} of O = P V. It reads P from HBM again.`;
    case "done":
      return step.order === "standard"
        ? `Done. HBM now holds ${N_q * N_k} scores S and ${N_q * N_k} weights P, which no later step needs.`
        : `Done: the same answer as with the whole square, difference ${step.difference.toFixed(3)}. There were never more than ${Math.min(B_r, N_q) * Math.min(B_c, N_k)} scores at a time.`;
  }
}

/** The algorithm as short NumPy: [text, line of the paper, ops that run it]. |…| is marked at shrink, ~…~ at add. */
const LISTING = {
  standard: [
    ["S[:] = τ * (Q[:] @ K[:].T)", "", "S"],
    ["P[:] = softmax(S[:])", "", "P"],
    ["O[:] = P[:] @ V[:]", "", "O"],
  ],
  fa1: [
    ["O, ℓ, m = 0, 0, -inf", "3", "init"],
    ["for j in range(T_c):", "6", ""],
    ["    k, v = K[j], V[j]", "7", "kv"],
    ["    for i in range(T_r):", "8", ""],
    ["        q, o, ℓ_i, m_i = Q[i], O[i], ℓ[i], m[i]", "9", "q"],
    ["        s = τ * (q @ k.T)", "10", "s"],
    ["        m_j = s.max(1); p = exp(s - m_j)", "12", "p"],
    ["        m_new = max(m_i, m_j)", "13", "max"],
    ["        α, β = exp(m_i - m_new), exp(m_j - m_new)", "13", "max"],
    ["        ℓ_new = |α * ℓ_i| ~+ β * p.sum(1)~", "13", "shrink add"],
    ["        o = (|α * ℓ_i * o| ~+ β * (p @ v)~) / ℓ_new", "15", "shrink add"],
    ["        O[i], ℓ[i], m[i] = o, ℓ_new, m_new", "15, 16", "store"],
  ],
  fa2: [
    ["for i in range(T_r):", "3", ""],
    ["    q, o, ℓ, m = Q[i], 0, 0, -inf", "4, 5", "q"],
    ["    for j in range(T_c):", "6", ""],
    ["        k, v = K[j], V[j]", "7", "kv"],
    ["        s = τ * (q @ k.T)", "8", "s"],
    ["        m_new = max(m, s.max(1))", "9", "max"],
    ["        p, α = exp(s - m_new), exp(m - m_new)", "9", "p"],
    ["        ℓ, m = |α * ℓ| ~+ p.sum(1)~, m_new", "9", "shrink add"],
    ["        o = |α * o| ~+ p @ v~", "10", "shrink add"],
    ["    O[i], L[i] = o / ℓ, m + log(ℓ)", "12–15", "end store"],
  ],
};

/** The numbers of the lines that have run for this tile, for the query `row`: one string for each line. */
function values(step, row) {
  const { order, op, rows, q, s, p, m, l, o, alpha, beta, before, own, was, gain, factor, came, L_i } = step,
    a = rows ? row - rows[0] : 0;
  if (order === "standard" || !rows) return LISTING[order].map(() => "");
  const keys = step.cols ? `keys ${range(step.cols)}` : "",
    scores = s ? list(s[a]) : "";
  const sums = !factor
    ? ["", ""]
    : gain
      ? [`${show(was.l[a])} + ${show(gain.l[a])} = ${show(l[a])}`, `… + ${list(gain.o[a])} = ${list(o[a])}`]
      : op === "shrink"
        ? [shrunk(order === "fa1" ? alpha[a] : factor[a], was.l[a]), shrunk(factor[a], was.o[a])]
        : ["", ""];
  if (order === "fa1")
    return [
      "",
      "",
      keys,
      "",
      came ? `${list(q[a], 1)}, ${list(came.o[a])}, ${show(came.l[a])}, ${show(came.m[a])}` : "",
      scores,
      p ? `${show(own[a])}; ${list(p[a])}` : "",
      before ? show(m[a]) : "",
      before ? `${show(alpha[a], 3)}, ${show(beta[a], 3)}` : "",
      ...sums,
      "",
    ];
  return [
    "",
    q ? list(q[a], 1) : "",
    "",
    keys,
    scores,
    before ? `max(${show(before[a])}, ${show(Math.max(...s[a]))}) = ${show(m[a])}` : "",
    p ? `${list(p[a])}, ${show(alpha[a], 3)}` : "",
    ...sums,
    L_i ? `${list(o[a])}, ${show(L_i[a])}` : "",
  ];
}
