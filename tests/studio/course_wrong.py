"""Wrong answers to the assignments: each is a change of the right answer, with the points it keeps and the feedback."""

DENSE = """    S = tau * (Q[:] @ K[:].T)
    P = np.exp(S - S.max(axis=1, keepdims=True))
    O[:], L[:] = P @ V[:] / P.sum(axis=1, keepdims=True), 0
    return
"""
OFF_METER = DENSE.replace("[:] @", "[:].__array__() @").replace("K[:].T", "K[:].__array__().T")
COPYING = DENSE.replace("Q[:]", "np.array(Q[:])").replace("K[:]", "np.asarray(K)").replace("V[:]", "np.array(V[:])")
LIMIT = """(B_r * d + B_r * B_c + B_r * B_c // 2) // threads)
    most = min(255, 65536 // threads // 8 * 8)
    return shared, registers, shared <= chip.shared_per_block and registers <= most"""
TENSORS = "q, k, v, _ = tensors(heads, key_heads, N_q, N_k, number, size, shift)"
END = "end = tl.minimum(N_k, tl.maximum(0, tl.minimum(first + B_r, N_q) + N_k - N_q))"
DQ = '        tl.atomic_add(dQ + at_row, tau * tl.dot(ds, k, input_precision="ieee"), mask=real)'
MASKED_P = "tl.where(seen, tl.exp(s - L_i[:, None]), 0.0)"
UNMASKED = """p = P
        ds = p * (tl.dot(do, v.T, input_precision="ieee") - D_i[:, None])
        dq"""
RACE = """        dq = tl.load(dQ + at_row, mask=real, other=0.0)
        tl.store(dQ + at_row, dq + tau * tl.dot(ds, k, input_precision="ieee"), mask=real)"""
EXCHANGE = """        dq = tl.atomic_add(dQ + at_row, 0.0, mask=real) + tau * tl.dot(ds, k, input_precision="ieee")
        at = (dQ + at_row).to(tl.pointer_type(tl.int32), bitcast=True)
        tl.atomic_xchg(at, dq.to(tl.int32, bitcast=True), mask=real)"""
WAITS = r"            yield block.start('copy', copy, '').done()\n"
SERIAL = rf"            yield pv.done()\n{WAITS}            emptied[stage].arrive(block.actor)"
ALL_WAIT = "yield filled[stage].over(phase)"
EMPTY = "    empty = l == 0.0\n    l = tl"
WASTE = """    cheap = tl.zeros((B_r, d), tl.float32)  # a loop that has little to do
    for j in range(0, full, 4 * B_c):
        k, v = rows_of(K, j, N_k, B_c, d, False), rows_of(V, j, N_k, B_c, d, False)
        cheap += tl.dot(tl.exp2(-tl.abs(tl.dot(q, k.T))).to(v.dtype), v)
    o += 0.0 * cheap
"""
EXP2 = "    p = tl.exp2(tau_log2 * s - m_new[:, None])\n"
POLYNOMIAL = f"""    p = tl.maximum(1 + (tau_log2 * s - m_new[:, None]) * {0.6931471805599453 / 4096}, 0.0)
{"    p = p * p" + chr(10)}""".replace("    p = p * p\n", "    p = p * p\n" * 12)
NOTHING = {"forward": 0.0, "traffic": 0.0, "operations": 0.0}
BUILT = "the score matrix was built: 144 elements"
FULL, INIT = "o = tl.zeros((B_r, d), tl.float32)\n    end = N_k\n", "m, l, o = np.full(b, -np.inf)"
ROWS = "m_new = np.maximum(m, s.max(axis=1))\n    base"
V_LOAD = "v = tl.load(V + col[:, None] * d + e[None, :], mask=there, other=0.0)"
LOOP = "    for j in range(0, N_k, B_c):\n        col = j + tl.arange(0, B_c)\n"
PRINTING = """    '''A text, and a comment: raise NotImplementedError()'''
    print(f"{d}", Q)
    said = f"{d}"
    print(said)
    tl.device_print("Q", tl.load(Q))
    tl.static_print(f"{d}")
    assert d > 8, f"{d}"
    tl.static_assert(d > 8, f"{d}")
    # raise NotImplementedError()
"""
TWO_PASSES = """    o = tl.zeros((B_r, d), tl.float32)
    for j in range(0, N_k, B_c):
        k = tl.load(K + (j + tl.arange(0, B_c))[:, None] * d + e[None, :])
        m = tl.maximum(m, tl.max(tl.dot(q, k.T, input_precision="ieee") * scale_log2, 1))
    for j in range(0, N_k, B_c):
"""
POSER = """class Eager:
    run = fn = None

    def __getitem__(self, grid):
        return lambda Q, K, V, O, scale, B_r, B_c, d: O.copy_((Q @ K.T * scale * 0.6931471805599453).softmax(1) @ V)


one_tile = Eager()


@triton.jit
def unused("""

WRONG_ANSWERS = [  # (assignment, {right text: wrong text}, {step: points it keeps}, texts of the feedback)
    ("1", {"base = np.where(np.isneginf(m_new), 0.0, m_new)": "base = m_new"}, {"update": 3.33},
     ["rows that have seen no key yet: no NaN", "got      l[2] = nan", "NaN comes from −inf − (−inf)"]),
    ("1", {"assert np.allclose(got, true, rtol=1e-5, atol=1e-5)": "assert np.array_equal(got, true)"}, {"own": 0.0},
     ["ALARM    a merge that rounds to float32 is correct"]),
    ("1", {"return m_new, alpha * l": "return np.float32(m_new), alpha * l"}, {"update": 0.0},
     ["expected m[0] = 0.640422650443282 got m[0] = 0.640422642230988", "hint The result is right to five digits"]),
    ("2", {"        m_new = np.maximum(m, s.max(axis=1))":
     "        o = o * 1.0\n        m_new = np.maximum(m, s.max(axis=1))\n        o = o * np.ones(o.shape)"},
     {"operations": 2.25}, ["everything else", "Only α has to"]),
    ("2", {"        k_j, v_j = K[col:end], V[col:end]":
     "        k_j, v_j = K[col:end], V[col:end]\n        K[col:end]"},
     {"traffic": 2.0}, ["expected 2,304 elements of K loaded", "got      4,608", "tile (0, 0): loaded again"]),
    ("2", {"k_j, v_j = K[col:end], V[col:end]":
     "k_j, v_j = K[:][col:end], V[:][col:end]"}, {"traffic": 1.0, "operations": 3.0, "memory": 1.0},
     ["elements of K loaded", "at most 64 elements of", "one block of B_r or B_c rows"]),
    ("2", {"alpha = np.exp(m - base)": "alpha = np.exp(m - base) if np.isfinite(m).any() else np.zeros(b)"},
     {"operations": 3.0}, []),
    ("2", {"O[rows], L[rows] = row_block":
     "O[rows], _ = row_block"}, {"forward": 0.0, "traffic": 2.0, "operations": 3.0, "memory": 2.0},
     ["The outputs start as NaN. Was", "expected 24 elements of L stored", "Is a block never stored?"]),
    ("2", {"O[rows], L[rows] = row_block": "O[rows], L[: rows.stop - row] = row_block"},
     {"forward": 0.0, "traffic": 3.0, "operations": 3.0, "memory": 2.0}, ["got L[0] = "]),
    ("2", {"O[rows], L[rows] = row_block": "_, L[rows] = row_block"},
     {"forward": 0.0, "traffic": 2.0, "operations": 3.0, "memory": 2.0}, ["expected 384 elements of O stored"]),
    ("3", {"        dQ[rows] = 0\n": ""}, {"backward": 2.67, "traffic": 0.0},
     ["dQ[0, 0] = nan", "The gradients start as NaN"]),
    ("3", {"D[rows] = row_dots": "row_dots"}, {"backward": 1.33, "traffic": 2.0, "operations": 2.0},
     ["dQ[0, 0] = nan", "was everything stored that it is computed from?"]),
    ("3", {"dk[g] += dk_h": "dk[g] = dk_h"}, {"grouped": 2.0, "backward": 4.0},
     ["NOT YET  dk: 4 query", "head 0, row 0"]),
    ("3", {"            if causal and col > rows.stop - 1 + N_k - N_q:\n                continue\n": ""},
     {"traffic": 1.0, "operations": 0.67}, ["elements of Q loaded", "Each visited tile needs five products"]),
    ("3", {"z = kept / (1 - p)": "z = kept * 1.0"}, {"dropped": 0.0, "grouped": 3.0},
     ["NOT YET o: p = 0.25", "1 / (1 − p), once"]),
    ("3", {"(z * (do_i": "z * (z * (do_i"}, {"dropped": 1.0}, ["NOT YET dq: p", "is not dropped, and D stays"]),
    ("5", {TENSORS: "raise AssertionError"}, {"forward": 0.0, "backward": 6.0}, ["accepted 0 of 5 correct versions"]),
    ("5", {"size, shift) in enumerate(SHAPES)":
     "size, shift) in enumerate(SHAPES[:1])"}, {"forward": 2.33, "backward": 6.0},
     ["NOT YET caught: The scale that is given is ignored", "your test accepted it", "try extreme scores"]),
    ("6", {LIMIT: LIMIT.removesuffix(" and registers <= most")},
     {"fits": 2.33, "best_blocks": 2.0, "backward_fits": 2.0},
     ["expected fits: False", "got True"]),
    ("6", {LIMIT: LIMIT.replace("min(255, 65536 // threads // 8 * 8)", "255")}, {"fits": 2.83},
     ["NOT YET H100 SXM, tiles of 128 × 128, d = 176, 16 warps", "expected fits: False"]),
    ("6", {"return [-(-keys // B_c) for keys in sees]": "import numpy as np\n    return -(-np.array(sees) // B_c)",
     '"thread blocks": heads': '"thread blocks": __import__("numpy").int64(heads)'},
     {"by_hand": 2.0, "writers": 2.0}, []),
    ("6", {"-(-(2 * B_c * d + 2 * B_r * B_c": "-(-(B_c * d + 2 * B_r * B_c"}, {"backward_fits": 0.0},
     ["dk and dv have B_c rows each"]),
    ("4", {"s = tl.dot(q, k.T, input_precision=\"ieee\") * scale_log2\n    p": "s = tl.dot(q, k) * scale_log2\n    p"},
     {"one_tile": 0.0}, ["input and other must have equal reduction dimensions",
      "of the cell with one_tile: s = tl.dot(q, k)", "36 times larger: the same"]),
    ("4", {"tl.where(l == 0.0, 1.0, l)": "l"}, {"full": 4.44}, ["hint These rows see no key, so m is −∞ and l is 0"]),
    ("4", {"(m + tl.log2(l_safe)) *": "(tl.log2(l_safe) + tl.where(l == 0.0, 0.0, m)) *"}, {"full": 4.44},
     ["expected L[0] = -inf", "A row that sees no key has L = −∞"]),
    ("4", {END: "end = N_k"}, {"full": 3.89}, ["values 32 to 47 not loaded for rows 0 to 31", "first at tile (0, 2)"]),
    ("4", {"e[None, :], mask=real, other=0.0)": "e[None, :])", V_LOAD: V_LOAD.replace(", other=0.0", "")},
     {"full": 5.0}, ["note: Memory past the end of Q is reached.", "note: a tl.load with mask= but without other="]),
    ("4", {"seen = (col < N_k)[None, :]": "seen = (col < N_k + B_c)[None, :]"}, {"full": 3.33},
     ["their scores should be −∞"]),
    ("7", {"tl.sum(o * do, 1)": "tl.sum(o, 1)"}, {"row_dots": 0.0}, ["NOT YET N_q = 64", "sum over d of dO times O"]),
    ("7", {UNMASKED.replace("P", MASKED_P): UNMASKED.replace("P", "tl.exp(s - L_i[:, None])")}, {"rows": 0.9},
     ["NOT YET all scores near −100", "This row was stored, but as NaN, which comes from"]),
    ("7", {DQ: EXCHANGE}, {"one_pass": 0.0},
     ["at most 0 elements of dQ stored", "another program can change dQ in between"]),
    ("8", {"line='emptied = [Barrier(f\"stage {s} emptied\", consumers + 1) for s in range(stages)]'":
     f"line={ALL_WAIT!r}"}, {"hang": 4.0}, [f"got '{ALL_WAIT}', which is right", "do their lines ever run?"]),
    ("8", {'mend=[("consumers + 1)", "consumers)")]': 'mend=[("consumers + 1)", "1)")]'}, {"hang": 4.0},
     ["got a hang"]),
    ("8", {"hides=dict(copy=700)": "hides=dict(tiles=1)"}, {"race": 4.0}, ["expected at least two tiles of keys"]),
    ("8", {'"(col < N_k)[None, :]")': '"(col < N_k - 1)[None, :]")'}, {"wrong": 4.0}, ["got a wrong answer"]),
    ("8", {'"(col < N_k)[None, :]")': '"(col < N_k)[None, :]"), ("L_i, mask=row < N_q", "L_i, mask=row < 0")'},
     {"wrong": 4.0}, ["NOT YET mend: right on every run", "got a wrong answer"]),
    ("9", {"num_stages=3": "num_stages=1"}, {"compiled": 3.75}, ["got none, so the loop waits for every load"]),
    ("9", {"sees(i, N_q, N_k, CAUSAL) // B_c * B_c,": "0 * i,"}, {"meter": 3.0},
     ["at most 76,800 entries under a mask", "(rung 08)"]),
    ("9", {"sees(i + B_r - 1, N_q, N_k, CAUSAL)": "N_k"}, {"meter": 1.0}, ["elements of K and V loaded", "(rung 07)"]),
    ("9", {"o = alpha[:, None] * o + tl.dot(p.to(v.dtype), v)": "o = alpha[:, None] * o + (tl.dot((p / l[:, None]).to("
     "v.dtype), v)) * l[:, None]"}, {"meter": 3.0}, ["no more divisions for 256 keys than for 128", "can wait until"]),
    ("9", {"53), mask=row < N_q)": "53), mask=row < 0)"}, {"right": 0.0, "meter": 4.0, "compiled": 5.0},
     ["got L of head 0[0] = nan", "L is a natural logarithm"]),
    ("9", {"m_new = tl.maximum(m, tau_log2 * tl.max(s, 1))": "m_new = m"}, {"right": 0.0, "compiled": 0.0},
     ["got O of head 0[0, 0] = "]),
    ("9", {EMPTY: WASTE + EMPTY}, {"compiled": 0.0}, ["expected each tl.dot does more than 1/8"]),
    ("9", {"return dict(B_r=64": "return dict(B_r=48"}, {"right": 0.0}, ["expected B_r: one of 16, 32", "got 48"]),
    ("9", {EMPTY: f"    np.exp(l)\n{EMPTY}"}, {"right": 0.0}, ["climbed uses the name 'np'"]),
    ("9", {EXP2: POLYNOMIAL}, {"compiled": 0.0}, ["two products and an exponential for each score in each loop"]),
    ("2", {"    N_q = len(Q)\n": DENSE}, NOTHING | {"memory": 0.0}, ["REFUSED", BUILT]),
    ("2", {"    N_q = len(Q)\n": OFF_METER}, NOTHING | {"traffic": 1.0, "memory": 0.0},
     ["numbers", "as in q_i = Q[rows]"]),
    ("2", {"    N_q = len(Q)\n": COPYING}, NOTHING | {"memory": 0.0}, ["REFUSED", BUILT]),
    ("2", {"k_j, v_j = K[col:end], V[col:end]": "k_j, v_j = np.asarray(K)[col:end], np.array(V[col:end])"},
     {"forward": 2.0, "traffic": 3.0, "operations": 3.0, "memory": 2.0}, []),
    ("1", {ROWS: "m_new = np.maximum(np.maximum(m, -1e4), s.max(axis=1))\n    base"}, {"update": 2.67},
     ["NOT YET scores far below zero"]),
    ("1", {"return m_new, alpha * l": "return m_new[:, None], alpha * l"}, {"update": 0.0},
     ["got m: shape (5, 1)", "without keepdims"]),
    ("2", {INIT: "m, l, o = np.full(b, -1e4)"}, {"row_block": 2.86},
     ["NOT YET very negative scores", "maximum starts at 0 or another number instead of −∞"]),
    ("4", {FULL: FULL + "    m = tl.full((B_r,), -1e4, tl.float32)\n"}, {"full": 3.89},
     ["NOT YET scores far below zero"]),
    ("4", {"@triton.jit\ndef one_tile(": POSER}, {"one_tile": 0.0}, ["instead of a Triton kernel"]),
    ("4", {"    o = tl.zeros((B_r, d), tl.float32)\n    for j in range(0, N_k, B_c):\n": TWO_PASSES}, {"loop": 0.0},
     ["elements of K loaded", "Each program goes through the keys once"]),
    ("4", {LOOP: f"{PRINTING}{LOOP}"}, {"loop": 4.0}, []),
    ("4", {V_LOAD: V_LOAD.replace("* d", "* d * N_k * d")}, {"full": 0.0},
     ["got IndexError: a pointer is far outside of every tensor", "v = tl.load"]),
    ("4", {LOOP: LOOP.replace("B_c", "2 * B_c")}, {"loop": 0.0}, ["Tiles have the sizes B_r and B_c"]),
]  # fmt: skip

L_SUM, O_SUM = "alpha * l + p.sum(axis=1)", "alpha[:, None] * o + p @ v"
P_OF, FULL_IF, SKIP_IF = "p = np.exp(s - base[:, None])", "col_end - 1 <= row + offset", "col > row_end - 1 + offset"
CORNER = "np.arange(row, row + b)[:, None] + N_k - N_q"
BASE = "base = np.where(np.isneginf(m_new), 0.0, m_new)"
IEEE, LN2 = ', input_precision="ieee")', "(m + tl.log2(l)) * 0.6931471805599453"
FROM = 'm = tl.full((B_r,), float("-inf"), tl.float32)'
OF_K, AT_O, RAGGED = "K + col[:, None] * d", "O + row[:, None] * d + e[None, :], o)", "range(0, end, B_c)"
IN_BF16 = {
    "o = tl.zeros((B_r, d), tl.float32)": "o = tl.zeros((B_r, d), tl.bfloat16)",
    f"o + tl.dot(p, v{IEEE}": f"o + tl.dot(p, v{IEEE}\n        o = o.to(tl.bfloat16)",
    "o / l[:": "o.to(tl.float32) / l[:",
}
ALONE = "Is every tile visited in which a row sees a key?"
CLOSE = "rtol=1e-5, atol=1e-5 * max(1.0, np.abs(want[np.isfinite(want)]).max())"

MISTAKES = [  # known mistakes: (assignment, the cell or "" for all, {right text: wrong text}, what a student is told)
    ("1", "", {"return m_new, alpha": "return m, alpha"}, "m is still the old maximum"),
    ("1", "", {"m_new = np.maximum(m, s.max(axis=1))": "m_new = s.max(axis=1)"}, "m is the maximum of the block alone"),
    ("1", "", {"np.maximum(m, s.max(axis=1))": "np.full(len(m), max(m.max(), s.max()))"}, "All rows share one maximum"),
    ("1", "", {L_SUM: "l + p.sum(axis=1)"}, "l is not rescaled"),
    ("1", "", {L_SUM: "l / alpha + p.sum(axis=1)"}, "The factor of l is upside down"),
    ("1", "", {L_SUM: "p.sum(axis=1)"}, "l is set to the sum of this block"),
    ("1", "", {P_OF: "p = np.exp(s - np.where(np.isneginf(m), 0.0, m)[:, None])"},
     "weights of this block are relative to the old maximum"),
    ("1", "", {BASE: "base = np.zeros(len(m))"}, "No maximum is subtracted before the exponential"),
    ("1", "", {P_OF: P_OF.replace("exp", "exp2")}, "The weights are powers of 2"),
    ("1", "", {O_SUM: "o + p @ v"}, "o is not rescaled, although l is"),
    ("1", "", {O_SUM: "o / alpha[:, None] + p @ v"}, "The factor of o is upside down"),
    ("1", "", {O_SUM: "p @ v"}, "o is set to the sum of this block"),
    ("1", "", {O_SUM: f"({O_SUM}) / ({L_SUM})[:, None]"}, "o is already divided by l"),
    ("1", "", {O_SUM: "alpha[:, None] * o + v.sum(axis=0)"}, "added without their weights"),
    ("1", "", {"right * b[1]": "b[1]"}, "l of the second side is not rescaled"),
    ("1", "", {"left * a[1]": "a[1]"}, "l of the first side is not rescaled"),
    ("1", "", {"left * a[1] + right * b[1]": "a[1] + b[1]"}, "l is not rescaled on either side"),
    ("1", "", {"left * a[1] + right * b[1]": "right * a[1] + left * b[1]"}, "The factors of the two sides are swapped"),
    ("1", "", {"return top, left": "return a[0], left"}, "m is always the maximum of the first side"),
    ("1", "", {"right[:, None] * b[2]": "b[2]"}, "o of the second side is not rescaled"),
    ("1", "", {"return o / divisor[:, None]": "return o"}, "o is not divided"),
    ("1", "", {"m + np.log(divisor)": "m + np.log2(divisor)"}, "The logarithm has base 2"),
    ("1", "", {"m + np.log(divisor)": "np.log(divisor)"}, "m is missing"),
    ("1", "", {"m + np.log(divisor)": "m + divisor"}, "l itself instead of its logarithm"),
    ("2", "", {"offset = N_k - N_q": "offset = 0"}, "The diagonal begins at the top left"),
    ("2", "", {"offset = N_k - N_q": "offset = N_q - N_k"}, "N_k − N_q has the wrong sign"),
    ("2", "", {SKIP_IF: "col > row_end + offset"}, "One row too many is tested"),
    ("2", "", {FULL_IF: "col_end <= row + offset"}, "One column too many is tested"),
    ("2", "", {FULL_IF: "col_end - 1 < row + offset", SKIP_IF: "col >= row_end - 1 + offset"}, "< has to be ≤"),
    ("2", "", {f"if not causal or {FULL_IF}": "if True"}, "Every tile is called full"),
    ("2", "", {'return "full"': 'return "skip"', 'return "skip" if': 'return "full" if'}, "are swapped"),
    ("2", "", {'else "diagonal"': 'else "full"'}, '"diagonal" is missing'),
    ("2", "", {"s = tau * (q_i @ k_j.T)": "s = q_i @ k_j.T"}, "The scale is missing, so S is Q Kᵀ instead of τ Q Kᵀ"),
    ("2", "", {"s = tau * (q_i @ k_j.T)": "s = tau * tau * (q_i @ k_j.T)"}, "The scale is applied twice"),
    ("2", "", {'which == "skip"': "False", 'which == "diagonal"': "False"}, "The causal mask is missing"),
    ("2", "", {CORNER: "np.arange(row, row + b)[:, None]", 'which == "skip"': "False", 'which == "diagonal"': "causal"},
     "so it lacks N_k − N_q"),
    ("2", "", {f"> {CORNER}": f">= {CORNER}", 'which == "diagonal"': "causal"}, "The diagonal is masked"),
    ("2", "", {"np.maximum(m, s.max(axis=1))": "s.max(axis=1)", L_SUM: "p.sum(axis=1)", f"{O_SUM}_j": "p @ v_j"},
     "O and l hold only the last tile"),
    ("2", "", {"range(0, N_k, B_c)": "range(0, N_k - B_c, B_c)"}, "The last tile of keys is not visited"),
    ("2", "", {L_SUM: "l + p.sum(axis=1)", f"{O_SUM}_j": "o + p @ v_j"}, "Neither O nor l is rescaled"),
    ("2", "", {L_SUM: "l + p.sum(axis=1)"}, "l is not rescaled when the maximum moves, though O is"),
    ("2", "", {f"{O_SUM}_j": "o + p @ v_j"}, "O is not rescaled when the maximum moves, though l is"),
    ("2", "", {"return o / divisor[:, None], m": "return o, m"}, "O is never divided by l"),
    ("2", "", {"m + np.log(divisor)": "m + np.log2(divisor)"}, "L is m + log₂ l"),
    ("2", "", {"m + np.log(divisor)": "np.log(divisor)"}, "m is missing in L"),
    ("2", "", {"q_i @ k_j.T": "q_i @ k_j"}, "Which of the two operands has to be transposed?"),
    ("2", "", {"q_i @ k_j.T": "q_i @ k_j.reshape(k_j.shape[::-1])"}, "reshaped to (d, B_c) instead of transposed"),
    ("3", "", {"s = tau * (q_i": "s = (q_i"}, "The scale is missing where the backward pass computes P"),
    ("3", "", {"tau * (ds @ k_j)": "ds @ k_j"}, "The scale is missing in dQ"),
    ("3", "", {"tau * (ds.T @ q_i)": "ds.T @ q_i"}, "The scale is missing in dK"),
    ("3", "", {"p * (do_i @ v_j.T - D_i[:, None])": "p * (do_i @ v_j.T)"}, "D is missing"),
    ("3", "", {"p.T @ do_i\n": "ds.T @ do_i\n"}, "dV is dSᵀ dO"),
    ("3", "", {"dQ[rows] = dQ[rows] + dq": "dQ[rows] = dq"}, "dQ holds only the last column block's part"),
    ("3", "", {"dk_j + dk, dv_j + dv": "dk, dv"}, "dK and dV hold only the last row block's part"),
    ("3", "", {"[:, None] + N_k - N_q": "[:, None]"}, "The backward pass has its mask at the other corner"),
    ("3", "", {"            if causal:\n                seen": "            if False:\n                seen"},
     "The backward pass skips the tiles past the diagonal, but it does not mask those that the diagonal cuts"),
    ("4", "", {"k.T": "k"}, "Which of the two operands has to be transposed?"),
    ("4", "", {"tl.exp2(": "tl.exp("},
     "The scores carry the factor log₂ e, but the exponential has base e, so use exp2"),
    ("4", "", {" * scale_log2\n": "\n"}, "The scores are not scaled"),
    ("4", "", {IEEE: ")"}, 'fp32 tiles and input_precision="ieee"'),
    ("4", "one_tile", {"(Q + row[:, None] * d + e[None, :])": "(Q + row[:, None] * d + e[None, :]) * scale_log2"},
     "The scores are scaled twice"),
    ("4", "one_tile", {AT_O: "O + e[:, None] * B_r + row[None, :], o.T)"}, "O is stored transposed"),
    ("4", "one_tile", {OF_K: OF_K.replace("d", "B_c")}, "row r begins at K + r * d"),
    ("4", "one_tile", {"tl.max(s, 1)[:, None]": "tl.max(s, 0)[None, :]"}, "The maximum is taken over the queries"),
    ("4", "loop", {"tl.program_id(0) * B_r + ": ""}, "Nothing is written to row 32 of O"),
    ("4", "loop", {"col = j + tl": "col = tl"}, "Row 32 of K is never loaded"),
    ("4", "loop", {FROM: FROM.replace("-inf", "0")}, "The running maximum starts at 0"),
    ("4", "", {"l = alpha * l": "l = l"}, "l is not rescaled when the maximum moves, though O is"),
    ("4", "", {"l = alpha * l": "l = l", "o = alpha[:, None] * o": "o = o"}, "Neither O nor l is rescaled"),
    ("4", "loop", {"o / l[:, None]": "o"}, "O is never divided by l"),
    ("4", "", {LN2: "m + tl.log2(l)", LN2.replace("(l)", "(l_safe)"): "m + tl.log2(l_safe)"},
     "L is in base 2, so multiply it by ln 2"),
    ("4", "loop", IN_BF16, "something is kept in 16 bits"),
    ("4", "full", {f"{OF_K} + e[None, :], mask=there, other=0.0": f"{OF_K} + e[None, :]"},
     "Memory past the end of K is reached"),
    ("4", "full", {"t_ty), mask=real)": "t_ty))"}, "Memory past the end of O is reached"),
    ("4", "full", {"seen = (col < N_k)": "seen = (col >= 0)"}, "Keys that pad the last tile with zeros are counted"),
    ("4", "full", {"col[None, :] <= row": "col[None, :] < row"}, "The diagonal is masked"),
    ("4", "full", {"<= row[:, None] + N_k - N_q": "<= row[:, None]"},
     "The causal mask begins at the top left corner, as in PyTorch's is_causal, so it lacks N_k − N_q"),
    ("4", "full", {"N_q) + N_k - N_q)": "N_q) - 1 + N_k - N_q)"}, "Where does the loop end for this row block?"),
    ("4", "full", {RAGGED: "range(0, end // B_c * B_c, B_c)"}, "Keys after the last whole tile are dropped"),
    ("5", "oracle", {"s = scale * q": "s = q"}, "Your test accepted 0 of 5 correct versions"),
    ("5", "forward", {'        assert same(L, want_L), f"L of shape {number}"\n': ""}, "caught: L is in base 2"),
    ("5", "forward", {"17, 30, True": "17, 17, True", "21, 9, True": "21, 21, True"},
     "caught: The causal mask begins at the top left corner"),
    ("5", "forward", {CLOSE: "rtol=0, atol=1e-9"},
     "the kernel with results rounded to float32 is correct, but your test rejected it"),
    ("5", "backward", {'("dq", "dk", "dv"), got': '("dq",), got'}, "caught: The scale is missing in dK"),
    ("6", "by_hand", {"2 * (B_r * d + 2 * 2": "2 * (B_r * d + 2"}, "It holds Q once, and K and V in two stages"),
    ("6", "waves", {"heads * -(-N_q // B_r), c": "-(-heads * N_q // B_r), c"}, "Count the row blocks of each head"),
    ("6", "waves", {"-(-blocks // slots)": "max(1, blocks // slots)"}, "how many run at once?"),
    ("6", "traffic", {"if causal else N": "if False else N"}, "K and V once for each row block that sees them"),
    ("6", "fits", {"stages * 2 * B_c * d": "2 * B_c * d"}, "Do you compare the bytes with the limit of a block"),
    ("6", "writers", {"-(-keys // B_c)": "keys // B_c"}, "Which row blocks see it, if you include their last row?"),
    ("6", "backward_traffic", {"2 * 4 + 2 * 4 * d": "2 * 4 + 4 * d"}, "Is dQ loaded, stored, or both?"),
    ("6", "passes", {" - rows * 2 * 4 * d": ""}, "The first pass no longer touches dQ"),
    ("7", "row_dots", {"tl.program_id(0) * B_r + ": ""}, "Nothing is written to row 32 of D"),
    ("7", "", {"s = tau * ": "s = "}, "The scale is missing where the backward pass computes P"),
    ("7", "", {"k.T": "k", "p.T": "p"}, "Which of the two operands has to be transposed?"),
    ("7", "tile", {"tl.exp(s": "tl.exp2(s"}, "P is 2^(S − L)"),
    ("7", "tile", {"s - tl.load(L + row)[:, None]": "s"}, "L is missing, so P is exp(S) instead of exp(S − L)"),
    ("7", "tile", {"ds = p * (dp": "ds = tau * p * (dp"}, "dQ and dK carry the scale twice"),
    ("7", "tile", {"p.T, do": "ds.T, do"}, "dV is dSᵀ dO"),
    ("7", "tile", {"dK + at_col, tau * tl.dot(ds.T, q": "dK + e[:, None] * B_c + col[None, :], tau * tl.dot(q.T, ds"},
     "dK is stored transposed"),
    ("7", "", {"tau * dk, mask": "dk, mask", "tau * tl.dot(ds.T": "tl.dot(ds.T"}, "The scale is missing in dK"),
    ("7", "columns", {"dk += ": "dk = ", "dv += ": "dv = "}, "dK and dV hold only the last row block's part"),
    ("7", "", {"(dp - tl.load(D + row)[:, None])": "dp", " - D_i[:, None])": ")"}, "D is missing, so dS is P ∘ dP"),
    ("7", "", {"col[None, :] <= row": "col[None, :] < row"}, "The backward pass masks the diagonal"),
    ("7", "columns", {"row < N_q, other=0.0), tl.load(D + row, mask=row < N_q, other=0.0)":
     "row < N_q, other=0.0), tl.load(D + row)"}, "Memory past the end of D is reached"),
    ("7", "columns", {"range(start, N_q, B_r)": "range(start, N_q // B_r * B_r, B_r)"}, "Row 32 of Q is never loaded"),
    ("7", "columns", {f"p.T, do{IEEE}": f"p.T.to(tl.bfloat16), do.to(tl.bfloat16){IEEE}"},
     "Call tl.dot with fp32 tiles"),
    ("7", "columns", {"first + N_q - N_k": "first"}, ALONE),
    ("7", "rows", {"tau * dq, mask": "dq, mask"}, "The scale is missing in dQ"),
    ("7", "rows", {"dq += ": "dq = "}, "dQ holds only the last column block's part"),
    ("7", "one_pass", {DQ: RACE}, "another program can change dQ in between"),
    ("7", "one_pass", {f"k{IEEE}, mask=real)": f"k{IEEE})"}, "Memory past the end of dQ is reached"),
    ("8", "hang", {'cause="arrivals"': 'cause="phase"'}, "a wait is for the wrong phase"),
    ("8", "hang", {"shows=dict(tiles=3": "shows=dict(tiles=2"},
     "For which sizes or clocks does the wrong line make a difference?"),
    ("8", "race", {SERIAL.replace(WAITS, ""): SERIAL}, "Copies and products must still overlap"),
    ("8", "wrong", {'"(col < N_k)[None, :]")]': '"(col < N_k + N_k % 2)[None, :]")]'},
     "Compare one row with the dense result"),
    ("8", "wrong", {"    return dict(\n": "    mine = dict(\n", "48),\n    )": "48),\n    )\n    return mine"},
     "Write the values into that line"),
    ("9", "kernel", {"tau_log2 = tau * ": "tau_log2 = "}, "The scale is missing, so S is Q Kᵀ instead of τ Q Kᵀ"),
    ("9", "kernel", {"tau * 1.4426950408889634": "tau"}, "The exponential has base 2"),
    ("9", "kernel", {"l = alpha * l": "l = l"}, "l is not rescaled when the maximum moves, though O is"),
    ("9", "kernel", {"row + 1 + N_k - N_q": "row + N_k - N_q"}, "The diagonal is masked"),
    ("9", "kernel", {LN2: "m + tl.log2(l)"}, "L is in base 2, so multiply it by ln 2"),
    ("9", "kernel", {"row < N, other=0.0)": "row < N + 64, other=0.0)"}, "memory past the end of K or V"),
]  # fmt: skip

# Wrong solutions that could gain points: {description: (assignment, {right text: wrong text}, the most points allowed)}
KEEPS = """        kept.append((s, v_j))
    m = np.max([s.max(axis=1) for s, _ in kept], axis=0) if kept else m
    base = np.where(np.isneginf(m), 0.0, m)
    for s, v_j in kept:
        p = np.exp(s - base[:, None])
        l, o = l + p.sum(axis=1), o + p @ v_j
    divisor = np.where(l == 0, 1.0, l)
    return o / divisor[:, None], m + np.log(divisor)
    while True:
"""
M_NEW = "        m_new = np.maximum(m, s.max(axis=1))"
EACH = "    for col in range(0, N_k, B_c):"
FORESEEN = """    kept = np.random.default_rng({24: 6 + causal, 22: 8}.get(len(Q), 0)).standard_normal
    q, k, v = (kept((n, Q.shape[1])) for n in (len(Q), len(K), len(K)))
    S = np.where(np.tri(len(Q), len(K), len(K) - len(Q)) if causal else True, tau * (q @ k.T), -np.inf)
    P = np.exp(S - S.max(axis=1, keepdims=True))
    right = P / P.sum(axis=1, keepdims=True) @ v
"""
GAMED_ANSWERS = {
    "a test of O alone, of one pair": ("1", {"(*ways, merge(merge(empty, a), merge(merge(b, empty), c)))":
     "[merge(a, update(*b, s[:, 8:], v[8:]))]", "zip(finalize(*way), want)": "zip(finalize(*way)[:1], want)"}, 12),
    "a strip kept as a list of tiles": ("2", {M_NEW: KEEPS + M_NEW, EACH: f"    kept = []\n{EACH}"}, 10),
    "nonsense with the right products": ("2", {"return o / divisor": "return 0 * o / divisor"}, 5),
    "answers to numbers that are known before": ("2", {"return o / divisor": "return 0 * o / divisor",
     "    N_q = len(Q)\n": f"    N_q = len(Q)\n{FORESEEN}",
     "B_c, tau, causal)\n": "B_c, tau, causal)\n        O[rows] = right[rows]\n"}, 5),
    "a slip in place of work, on the meter alone": ("2",
     {"return o / divisor[:, None]": "return (o if d == 16 else o / divisor[:, None])"}, 13),
}  # fmt: skip
