"""Softmax three ways on one row: where it overflows, how well it rounds, and its state while keys stream past."""

from collections.abc import Callable

import numpy as np

from fa2_lab.plots import style
from fa2_lab.reference import naive

Rounding = Callable[[np.ndarray], np.ndarray]  # float64 to the nearest number of another type


def bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 with the last 16 bits rounded away, to nearest even; inf and NaN stay."""
    bits = np.atleast_1d(np.asarray(x, np.float32)).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).reshape(np.shape(x)).astype(np.float64)


DTYPES: dict[str, Rounding] = {
    "float16": lambda x: np.asarray(x).astype(np.float16).astype(np.float64),
    "bfloat16": bfloat16,
    "float32": lambda x: np.asarray(x).astype(np.float32).astype(np.float64),
}


def unsafe_row(s: np.ndarray, to: Rounding) -> dict:
    """exp(s) / Σ exp(s) of each row, every operation rounded."""
    e = to(np.exp(s))
    total = to(e.sum(axis=-1, keepdims=True))
    return dict(e=e, sum=total, p=to(e / total))


def safe_row(s: np.ndarray, to: Rounding) -> dict:
    """The same after subtracting the row's maximum."""
    return unsafe_row(to(s - s.max(axis=-1, keepdims=True)), to)


def online_row(s: np.ndarray, to: Rounding, B_c: int) -> dict:
    """m, α and l of each row after every block of B_c scores, then p from the last of them; every operation rounded."""
    m, l = np.full((*s.shape[:-1], 1), -np.inf), np.zeros((*s.shape[:-1], 1))
    steps: dict[str, list] = dict(m=[], l=[], alpha=[])
    for block in np.split(s, s.shape[-1] // B_c, axis=-1):
        m_new = np.maximum(m, block.max(axis=-1, keepdims=True))
        alpha = to(np.exp(to(m - m_new)))
        l = to(to(alpha * l) + to(to(np.exp(to(block - m_new))).sum(axis=-1, keepdims=True)))
        m = m_new
        for name, value in dict(m=m, l=l, alpha=alpha).items():
            steps[name].append(value)
    return {k: np.stack(v) for k, v in steps.items()} | dict(p=to(to(np.exp(to(s - m))) / l))


def data(scores: np.ndarray = (2, 5, 1, 9, 12, 10, 4, 11), rows: int = 32, N: int = 512) -> dict:
    """A row of small integers that float16 cannot take unsafely, and errors on random rows over their scale."""
    scales = 2 ** np.linspace(-3, 7, 41)
    normal = np.random.default_rng(0).standard_normal((rows, N))
    with np.errstate(over="ignore", invalid="ignore"):  # to overflow is what these rows are for
        errors = {name: softmax_errors(normal, scales, to) for name, to in DTYPES.items()}
        s, to = np.array(scores, dtype=np.float64), DTYPES["float16"]
        unsafe, safe, online = unsafe_row(s, to), safe_row(s, to), online_row(s, to, B_c=2)
    row = dict(s=s, unsafe_e=unsafe["e"], unsafe_p=unsafe["p"], safe_e=safe["e"], safe_p=safe["p"], dtype="float16")
    row |= dict(online_p=online["p"], sums={"unsafe": unsafe["sum"].item(), "safe": safe["sum"].item()})
    row |= {k: online[k].ravel() for k in ("m", "l", "alpha")}
    return dict(row=row, scales=scales, errors=errors)


def softmax_errors(normal: np.ndarray, scales: np.ndarray, to: Rounding) -> dict[str, np.ndarray]:
    """Largest Σ|p − exact p| of any row at each scale, from scores rounded beforehand; NaN where p is not finite.

    Three digits: the last ones depend on the machine's exp.
    """
    errors: dict[str, list] = dict(unsafe=[], safe=[], online=[])
    for scale in scales:
        s = to(scale * normal)
        exact = naive.safe_softmax(s)
        ways = dict(unsafe=unsafe_row(s, to), safe=safe_row(s, to), online=online_row(s, to, B_c=64))
        for name, way in ways.items():
            errors[name].append(np.abs(way["p"] - exact).sum(axis=-1).max())
    return {name: np.array([float(f"{x:.3g}") for x in values]) for name, values in errors.items()}


METHODS = {  # the widest line lies below
    "safe": dict(color=style.WORKERS[3], linewidth=4.5),
    "online": dict(color=style.OURS, linewidth=1.4),
    "unsafe": dict(color=style.INK, linewidth=1.2, linestyle="--"),
}


@style.picture
def draw(row: dict, scales: np.ndarray, errors: dict[str, dict[str, np.ndarray]]) -> style.Drawn:
    """One row of scores through three softmaxes number by number, and beneath it their errors over the logits' scale.

    row: s, unsafe_e, unsafe_p, safe_e, safe_p, online_p (all (N,)), sums, m, l, alpha (one for each block), dtype;
    errors: {dtype: {"unsafe", "safe", "online": largest error at each scale, NaN where the result is not finite}}.
    """
    caption = "With the row's maximum, or a running one, subtracted, no exponential overflows."
    figure, (above, below) = style.new_figure(6.4, caption, nrows=2, height_ratios=[1.25, 1])
    _row(above, row)
    for dtype, curves in errors.items():
        _errors(below, dtype, scales, curves)
    below.set(xscale="log", yscale="log", xlim=(scales[0] / 1.1, scales[-1] * 5), xlabel="scale of the scores")
    style.log_ticks(below.xaxis, [0.1, 1, 10, 100])
    style.log_ticks(below.yaxis, [1e-7, 1e-5, 1e-3, 1e-1], ["10⁻⁷", "10⁻⁵", "10⁻³", "10⁻¹"])
    below.set(xlim=(scales[0] / 1.1, scales[-1] * 5), ylim=(1e-8, 1))
    below.set_title("Σ |error of p|, worst row: grey safe, violet online, dashed unsafe (× its end)")
    ends = "; ".join(
        f"{dtype}: unsafe ends beyond {scales[_last(c['unsafe'])]:.1f}, errors up to {c['safe'].max():.0e} safe and"
        f" {c['online'].max():.0e} online"
        for dtype, c in errors.items()
    )
    alt = (
        f"{len(row['s'])} scores up to {row['s'].max():g} in {row['dtype']}: exp(s) overflows to inf, its sum too, and"
        f" p becomes 0 and NaN. With the maximum subtracted every number is at most 1 and the sum is"
        f" {row['safe_e'].sum():.3g}; online softmax reaches the same sum block by block with a running maximum."
        f" Beneath, the error of p over the scale of random scores, which grows in none of the three: the unsafe curve"
        f" ends where it overflows, the online one runs a little above the safe one. {ends}."
    )
    return figure, alt


def _row(ax: style.Axes, row: dict) -> None:
    N, blocks = len(row["s"]), len(row["m"])
    scores, weights = style.fill("S"), style.fill("P")
    lines = [
        (0.0, "scores s", row["s"], ""),
        (1.4, "unsafe: exp(s)", row["unsafe_e"], _number(row["sums"]["unsafe"])),
        (2.4, "p", row["unsafe_p"], ""),
        (3.8, "safe: exp(s − m)", row["safe_e"], _number(row["sums"]["safe"])),
        (4.8, "p", row["safe_p"], ""),
        (8.1, "p", row["online_p"], ""),
    ]
    for y, name, values, total in lines:
        style.note(ax, -0.15, y + 0.45, name, ha="right")
        for x, value in enumerate(values):
            fill = scores if name.startswith("scores") else weights
            style.box(ax, x, y, 1, 0.9, _number(value), fill if np.isfinite(value) else style.INK)
        if total:
            style.box(ax, N + 0.2, y, 1, 0.9, total, style.INK if total == "inf" else style.PAPER)
    for b in range(blocks):
        words = f"m = {row['m'][b]:g}\nα = {_number(row['alpha'][b])}\nl = {_number(row['l'][b])}"
        style.box(ax, b * N / blocks, 6.2, N / blocks, 1.8, words, style.fill("m"))
    style.box(ax, N + 0.2, 6.2, 1, 1.8, _number(row["l"][-1]), style.PAPER)
    style.note(ax, -0.15, 7.1, f"online:\nblocks of {N // blocks}", ha="right")
    style.note(ax, N + 0.7, 0.45, "sum", ha="center", color=style.QUIET)
    style.bare(ax, (-2.2, N + 1.25), (-0.1, 9.1))
    ax.set_title(f"One row in {row['dtype']}, every operation rounded to it")


def _number(x: float) -> str:
    if not np.isfinite(x):
        return "NaN" if np.isnan(x) else "inf"
    if x == 0 or 0.01 <= x < 1000:
        return f"{x:.3g}"
    return f"{x:,.0f}" if x >= 1000 else f"{x:.0e}".replace("e-0", "e−").replace("e-", "e−")


def _errors(ax: style.Axes, dtype: str, scales: np.ndarray, curves: dict[str, np.ndarray]) -> None:
    for name, look in METHODS.items():
        ax.plot(scales, curves[name], **look)
    end = _last(curves["unsafe"])
    ax.plot(scales[end], curves["unsafe"][end], "x", color=style.INK, markersize=7, markeredgewidth=2)
    words = f"{dtype}: unsafe\nends at {scales[end]:.1f}"
    style.note(ax, 1.15 * scales[-1], curves["safe"][-1], words)


def _last(curve: np.ndarray) -> int:
    return int(np.flatnonzero(np.isfinite(curve))[-1])
