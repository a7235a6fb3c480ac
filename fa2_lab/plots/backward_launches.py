"""Timeline of the launches in the Hopper backward pass, with and without programmatic dependent launch (PDL)."""

from fa2_lab.machine import chips
from fa2_lab.plots import style

START = 3.0  # assumed time in µs between the launch of a kernel and the start of its work


def data(N: int = 512, heads: int = 16, d: int = 128) -> dict:
    """Return each kernel's execution time in µs, assuming that HBM and the tensor cores reach their datasheet rates."""
    bytes_us, numbers = chips.H200.hbm_bytes_per_second / 1e6, N * d * heads
    work = {
        "before": numbers * (2 + 2 + 4) / bytes_us,  # O and dO are read, and the accumulators are cleared
        "backward": 10 * N * N * d * heads / (chips.H200.tensor_flops_per_second / 1e6),
        "after": numbers * (4 + 2) / bytes_us,  # the accumulators are read, and dQ is written
    }
    return dict(work=work, setting=f"Model of an H200, {heads} heads, N = {N}, d = {d}; a launch takes {START:g} µs")


@style.picture
def draw(work: dict[str, float], setting: str) -> style.Drawn:
    """Draw a timeline of the three kernels in launch order. `work` is {kernel: execution time in µs}."""
    caption = "With programmatic dependent launch (PDL), a kernel is launched while the one before it runs."
    figure, axes = style.new_figure(
        2.9,
        f"{caption} A hatched box is a launch, and a filled box is the work, in µs. {setting}.",
        nrows=2,
        sharex=True,
    )
    ends = {}
    most = sum(work.values()) + START * len(work)
    for ax, (name, early) in zip(axes, {"Without PDL": False, "With PDL": True}.items(), strict=True):
        free = launched = 0.0
        for y, (kernel, clocks) in enumerate(work.items()):
            begun = launched if early else free
            ready = max(begun + START, free)
            style.box(ax, begun, y + 0.1, START, 0.8, "launch", hatch=style.MASK_HATCH, linewidth=0.8)
            if ready > begun + START:
                ax.plot([begun + START, ready], [y + 0.5, y + 0.5], color=style.QUIET, linewidth=1)
            words = f"{clocks:.1f}" if clocks > 0.045 * most else ""
            style.box(ax, ready, y + 0.1, clocks, 0.8, words, style.worker_color(3), linewidth=0.8)
            style.note(ax, -0.012 * most, y + 0.5, kernel, ha="right")
            launched, free = begun + 0.5, ready + clocks
        ends[name] = free
        names = (0.22 if style.is_narrow() else 0.12) * most
        style.strip_axes(ax, (-names, 1.005 * most), (0, len(work)), xticks=range(0, int(most) + 1, 3))
        ax.set_title(f"{name}: ends after {free:.1f} µs")
    axes[-1].set_xlabel("µs →")
    words = "; ".join(f"{name}: {end:.1f} µs" for name, end in ends.items())
    return figure, f"Two timelines of three kernels, each with its launch and its work. A line is a wait. {words}."
