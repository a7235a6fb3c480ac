"""What a line in Triton or in a notebook looks like that may carry a tag: reviewed expressions, tag by tag.

`tl.`, `gl.`, `hopper.`, `np.` and `torch.` are left out of the code before it is compared. A line carries exactly the tags whose
expression it matches. In the file that stands for an algorithm in Triton that holds for every line of it; elsewhere
for every line that carries a tag of the algorithm. To tag a line of a new shape, add the shape here.
"""

# ruff: noqa: E501  an expression is easier to compare with its line of code when it is not broken

import re

LOADS_KV = r"^(k_j = (load_\w+\((cache\.)?K,|K\.load)|v_j = (load_\w+\((cache\.)?V,|V\.load)|k_j, v_j = (K\[.*V\[|load_rows\(K, .*load_rows\(V, )|(fetch|fill)\([KVkv],|pipes\.(k\.fill\(.*\bK,|v\.fill\(.*\bV,))"
FOR_I, FOR_J = r"^for i in ", r"^for j in "

SHAPES = {
    # FA1, forward
    "FA1.A2.L2": r"^call = _Call\(",
    "FA1.A2.L3": r"^(O|O_sum|l|m|l, m) = .*(zeros|full)|^O\[:\], l\[:\], m\[:\] = 0, 0, -inf",
    "FA1.A2.L4": r"^call = _Call\(",
    "FA1.A2.L5": r"^call = _Call\(",
    "FA1.A2.L6": FOR_J,
    "FA1.A2.L7": LOADS_KV,
    "FA1.A2.L8": FOR_I,
    "FA1.A2.L9": r"^(q_i = load_rows\(Q,|o_i = load_rows\(O|l_i(, m_i)? = load\(l \+|m_i = load\(m \+)",
    "FA1.A2.L10": r"^s_ij = .*(dot\(q_i, k_j\.T|Q\[rows\] @ k_j\.T)",
    "FA1.A2.L11": r"^(s_ij = |return )where\(.*, s_ij, NEG_INF\)",
    "FA1.A2.L12": r"^(m_ij|m_tile) = .*max\(.*|^p(_ij)? = exp2?\(s(_ij)? - .*m_(ij|tile)|^l_tile = p\.sum|^return m_ij, p_ij, sum",
    "FA1.A2.L13": r"^m_new = maximum\(m(_i)?, m_(ij|tile)\)|^alpha, beta = exp2?\(m(_i)? - .*m_new.* exp2?\(m_(ij|tile) - |(^l_new = |^return m_new, )alpha \* l(_i)? \+ beta \* ",
    "FA1.A2.L15": r"^(r|share) = 1\.0 / |^pv = dot\(p_ij|^o_(i|new) = \(.*alpha \* l.*\* o(_i)? \+ .*beta.* \* |^store(_rows)?\(O|^O\[rows\], l\[rows\], m\[rows\] = fa1_step\(",
    "FA1.A2.L16": r"l\[rows\], m\[rows\] = fa1_step\(|^store\(l \+ \w+, l_|^store\(m \+ \w+, m_",
    "FA1.A2.L19": r"m(_new)? \+ log2?\(.*l",
    # standard attention and FA1, backward: in notebooks alone
    "FA1.A3.L1": r"^dV = P\.T @ dO",
    "FA1.A3.L2": r"^dP = dO @ V\.T",
    "FA1.A3.L3": r"^dS = P \* \(dP - \(P \* dP\)\.sum",
    "FA1.A3.L4": r"^dQ = tau \* \(dS @ K\)",
    "FA1.A3.L5": r"^dK = tau \* \(dS\.T @ Q\)",
    "FA1.A4.L6": FOR_J,
    "FA1.A4.L9": FOR_I,
    "FA1.A4.L11": r"^s = tau \* \(q @ k\.T\)",
    "FA1.A4.L13": r"^p = exp\(s - m\[:, None\]\) / l\[:, None\]",
    "FA1.A4.L16": r"^dv = p\.T @ do",
    "FA1.A4.L17": r"^dp = do @ v\.T",
    "FA1.A4.L19": r"^D = \(do \* o\)\.sum\(axis=1\)",
    "FA1.A4.L20": r"^ds = p \* \(dp - D\[:, None\]\)",
    "FA1.A4.L21": r"^return tau \* \(ds @ k\), |^dQ\[rows\] \+= dq",
    "FA1.A4.L22": r", tau \* \(ds\.T @ q\), dv",
    # FA2, forward
    "FA2.A1.L1": r"^(T_r|grid) = .*(cdiv|block_count)\(N_q, ",
    "FA2.A1.L2": r"^(T_r|grid) = .*(cdiv|block_count)\(N_q, ",
    "FA2.A1.L3": FOR_I + r"|^i(, \w+)? = (program_id|place)\(",
    "FA2.A1.L4": r"^q_i = (load\w*\((group_rows\()?(rows\.)?Q|Q\.load|Q\[)|q\.fill\(.*, Q,|^q_i = take\(q,|^(fetch\(Q,|fill\(q,)",
    "FA2.A1.L5": r"^[ol](_i)?(, l_i)? = zeros\(|^m(_i)? = full\(.*, (NEG_INF|LOWEST), |^m, scale, l = first_state\(|SoftmaxState\.reset|^o_i, l_i, m_i = zeros\(.* full\(.*, -inf\)",
    "FA2.A1.L6": FOR_J + r"|^for n in range\(",
    "FA2.A1.L7": LOADS_KV,
    "FA2.A1.L8": r"^s_ij = .*(dot\(q_[ij], k_j\.(T|permute\(0, 2, 1\))|q_i @ k_j\.T)|warpgroup_mma\(q(_i)?, k(_j)?\.permute|^s_ij = scores\(|^p_ij = exp2\(s_ij \* c_i\[",
    "FA2.A1.L9": r"^(m_new|top) = (maximum\(m(_i)?, .*max\(s|raised\(m_i, top)|^m, scale, alpha = raised\(m, scale, largest\(x\)|^p(_ij)? = exp2?\(.*\bs(_ij)?\b.* - .*m_(new|ref)|^p_ij = exp2\(tau_log2 \* x - along\(m_new|^p = exp2\(along\(scale, x\) \* x - along\(m, x|^alpha = exp2?\(\(?m(_i)? - m_(new|ref)\b|^l(_i)? = (alpha|shrink).* \* l(_i)? \+ .*sum\(|state\.update\(|^o_i, l_i, m_i = raw_step\(|= softmax_step\(s_ij, m_i, l_i,",
    "FA2.A1.L10": r"^o(_i)? = (alpha\[:(, :)?, None\] \* o_i \+ (sum\()?dot\(p_ij|dot\(p_ij.*, v_j, alpha\[:, None\] \* o_i|warpgroup_mma\(p(_ij)?, (pipes\.v|rows_of\(v|take\(v))|^return shrunk\(o, alpha\)|state\.update\(|^o_i, l_i, m_i = raw_step\(",
    "FA2.A1.L12": r"\bo(_i)? / (l_i|whole|divisor|convert_layout\(l_i)|\bo(_i)? \* .*1\.0 / (whole|divisor|l)\b|1\.0 / l_i.*\[:(, :)?, None\] \* o_i|state\.finalize",
    "FA2.A1.L13": r"\bm(_i)?( \* [\w.]+)? \+ log2?\(|state\.finalize",
    "FA2.A1.L14": r"^store(_rows)?\((group_rows\()?(rows\.)?O|^O\.store|to_global\(O,|^O\[rows\]",
    "FA2.A1.L15": r"^store\((rows\.)?L \+|^store\(at, L_i,|\bL\[rows\] = ",
    "FA2.A1.L17": r"^return O, L$",
    # FA2, backward
    "FA2.A2.L1": r"(cdiv\(|block_count\()N_[qk], (sequences, )?(B_[rc]|64)\)",
    "FA2.A2.L2": r"(cdiv\(|block_count\()N_q, (sequences, )?(B_r|64)\)",
    "FA2.A2.L3": r"^dQ = (\w+ = )?zeros|^dQ\[:\] = 0|^store\(sums \+ at, zeros\)",
    "FA2.A2.L4": r"^D_i = sum\(do_i \* o_i, 1\)|^store\(D \+|^D\[:\] = \(dO\[:\] \* O\[:\]\)\.sum",
    "FA2.A2.L5": FOR_J + r"|^j(, \w+)? = (program_id|place)\(",
    "FA2.A2.L6": LOADS_KV,
    "FA2.A2.L7": r"^dk(_j)?(, dv_j)? = zeros|^dv(_j)? = (zeros|dk_j)|^store\(sums \+ at, zeros\)",
    "FA2.A2.L8": r"^for (i|_|m) in ",
    "FA2.A2.L9": r"^(q_i = load_\w+\(Q|do_i = load_\w+\(dO|L_i = of_rows\((rows\.)?L|D_i = of_rows\((rows\.)?D|q_i, do_i, L_i, D_i = |pipes\.rows\.fill\(|fill\((q|started|do), i - first)",
    "FA2.A2.L10": r"^s = k @ q\.T - L_i / tau|^s(_ij)? = .*(dot\((q_i, k_j|a, b)\.T|q_i @ k_j\.T)|warpgroup_mma\((k, q|k_c, q_i)\.permute|^power = s_ij \* (scale_log2|scales\.fine) - L_i",
    "FA2.A2.L11": r"^p(_ij|_ji)? = exp2?\((?!sinks)|^return exp2\(s - |^power = s_ij \* (scale_log2|scales\.fine) - L_i",
    "FA2.A2.L12": r"^dv_j = (add_product\(dv_j, kept_ji.*, do_i|dot\(p_(ji|ij\.T).*, do_i, dv_j|dv_j \+ p_ij\.T @ do_i)|warpgroup_mma\(p(_ji)?, do(_i)?, dv|^dv = dv \+ p @ do",
    "FA2.A2.L13": r"^dp = v @ do\.T - D_i|^dp_(ij|ji) = (dot\((do_i, v_j|v_j, do_i)\.T|do_i @ v_j\.T)|warpgroup_mma\((held|v|v_j), do(_i)?\.",
    "FA2.A2.L14": r"^(ds(_ij|_ji)? = |return )\(?p(_ij|_ji)? \* \(?dp",
    "FA2.A2.L15": r"^dq = tau \* \(ds\.T @ k\)|^dq_i = .*\bds_(ij|ji)\b.*k_j|^atomic_add\(.*\bdQ|^add_tile\(dq, sums|^add\(sums, \[number|warpgroup_mma\(ds, k, zero|warpgroup_mma\(ds_ji\.permute.*, k_j, dq_i|^dQ\[rows\] = |^add(_rows)?\(dQ",
    "FA2.A2.L16": r"^dk = dk \+ tau \* \(ds @ q\)|^dk_j = .*\bds_(ij|ji)\b.*q_i|warpgroup_mma\(ds, q, dk",
    "FA2.A2.L18": r"^(store(_rows)?|add_tile|finish)\(.*\bd[KV],|^dK\[cols\], dV\[cols\] = ",
    "FA2.A2.L20": r"^return dQ.*, dK, dV|^finish\(sums, n, dQ,",
}


def tags_for(text: str, algorithm: str) -> set[str]:
    """The tags of an algorithm whose expression a line of code matches."""
    bare = re.sub(r"\b(tl|gl|np|torch|hopper)\.", "", text.split("  #")[0].strip())
    return {tag for tag, shape in SHAPES.items() if tag.startswith(algorithm + ".") and re.search(shape, bare)}
