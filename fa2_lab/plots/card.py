"""All shapes, formulas and prices of the book on one page of A5."""

from fa2_lab.machine import chips
from fa2_lab.machine.prices import cost, prices
from fa2_lab.plots import style

SHAPES = {
    r"$Q, O, dO, dQ$": r"$N_q \times d$, in HBM; a block on chip, $q_i, o_i$: $B_r \times d$",
    r"$K, V, dK, dV$": r"$N_k \times d$; a block, $k_j, v_j$: $B_c \times d$",
    r"$S, P, dP, dS$": r"$N_q \times N_k$; a tile: $B_r \times B_c$",
    r"$m, \ell, L, D$": r"$N_q$: one number a row",
}
FORWARD = {
    r"$S = \tau\,Q K^T,\ P = \mathrm{softmax}(S),\ O = P V$": r"attention; $\tau$ is usually $d^{-1/2}$",
    r"$m_\mathrm{new} = \max(m, \mathrm{rowmax}\,s)$": r"a new tile $s$ of scores, $v$ of values",
    r"$\alpha = \exp(m - m_\mathrm{new}),\ p = \exp(s - m_\mathrm{new})$": "what old sums shrink by; new terms",
    r"$\ell \leftarrow \alpha\,\ell + \mathrm{rowsum}\,p,\ o \leftarrow \alpha\,o + p\,v$": "both sums go on",
    r"$O = o / \ell,\ L = m + \log \ell$": r"at the end; a row without keys: $O = 0,\ L = -\infty$",
    r"$\alpha_a (\ell_a, o_a) + \alpha_b (\ell_b, o_b)$": (
        r"two states, $\alpha_a = \exp(m_a - \max(m_a, m_b))$; $(L, 1, O)$ is one"
    ),
}
BACKWARD = {
    r"$P = e^{S - L}$": "computed again, tile by tile",
    r"$D = \mathrm{rowsum}(dO \circ O)$": r"$= \mathrm{rowsum}(P \circ dP)$",
    r"$dV = P^T dO,\ dP = dO\,V^T$": "",
    r"$dS = P \circ (dP - D)$": "its rows sum to 0",
    r"$dQ = \tau\,dS\,K,\ dK = \tau\,dS^T Q$": "",
}
COUNTS = {
    r"$4 N^2 d$ forward, $10 N^2 d$ backward": "FLOPs; a multiply-add is two; causal: half",
    r"$N^2 (4 + 3 d / 128) + N d$": r"elements by standard; $4 N^2 + 4 N d$ reach DRAM",
    r"$N^2 (3 d + 4) / B_c + N (3 d + 2)$": "by FA1; with many heads all reach DRAM",
    r"$N^2\, 2 d / B_r + N (2 d + 1)$": r"by FA2; $N (4 d + 1)$ reach DRAM, if L2 has room",
}
NAMES = {
    "fp32": "another add or multiply-add",
    "exp": "an exponential",
    "shared": "a byte from shared memory",
    "l2": "a byte from L2",
    "dram": "a byte from DRAM (HBM)",
}


def data(name: str = "H200") -> dict:
    """The formulas, and what is computed for one chip: its prices, and the limits of the three methods."""
    chip = chips.named(name)
    priced = {NAMES[unit]: f"{flops:.0f}" for unit, flops in prices(chip).in_flops().items()}
    limits = {}
    for method in ("standard", "FA1", "FA2"):
        asked = cost(method, chip=chip)
        unit, seconds = asked.limit(chip)
        words = f"{asked.flops / seconds / 1e12:.0f} TFLOP/s, set by {unit}"
        limits[method] = f"{words}{' (as printed, one worker a head)' if method == 'FA1' else ''}"
    sections = {
        "Shapes": SHAPES,
        "Forward": FORWARD,
        "Backward": BACKWARD,
        "Counts, one head; elements are those that SMs request": COUNTS,
        f"Prices in FLOPs of the tensor cores, {chip.name}": priced,
        "64 heads, N = 4,096, d = 128, tiles 64 × 64": limits,
    }
    return dict(sections=sections)


LINE, GAP, RIGHT = 0.235, 0.16, 2.9  # inches from line to line, above a section, and of the second column
SHORT = 5  # letters that a phone has room for in the second column; what is longer stands below


@style.picture
def draw(sections: dict[str, dict[str, str]]) -> style.Drawn:
    """A section is a title and lines of two parts: a formula or number, and what it is."""
    below = [right for lines in sections.values() for right in lines.values() if style.narrow() and len(right) > SHORT]
    height = sum(GAP + LINE * (1 + len(lines)) for lines in sections.values()) + LINE * len(below) + 0.1
    caption = "Shapes, formulas and prices on one page."
    figure, ax = style.new_figure(height, caption)
    y = 0.0
    for title, lines in sections.items():
        y += GAP
        style.note(ax, 0, y, title, weight="bold")
        for left, right in lines.items():
            y += LINE
            style.note(ax, 0.1, y, left)
            y += LINE * (right in below)
            style.note(ax, 0.35 if right in below else RIGHT, y, right)
        y += LINE
    style.bare(ax, (0, style.width() - 0.1), (0, y))
    *_, priced, limits = sections.values()
    numbers = "; ".join(f"{left}: {right}" for left, right in (priced | limits).items())
    return figure, f"A page of formulas, in sections: {'; '.join(sections)}. {numbers}"
