"""Bar chart of the shared memory and the registers of an SM that one program of the Hopper forward kernel uses."""

from fa2_lab.kernels.hopper.forward import configs
from fa2_lab.machine import chips
from fa2_lab.plots import style

CONFIGS = (("DEFAULT", 64), ("TWO_CONSUMERS", 64), ("DEFAULT", 128), ("THREE_CONSUMERS", 128))
REGISTER_FILE = chips.H200.registers_per_sm
PRODUCER_REGISTERS = 24  # registers per producer thread in forward_kernel without packed sequences


def data() -> dict:
    """Return, for four configurations, each tensor's buffer size in KiB and each consumer's registers per thread."""
    shared, registers = {}, {}
    for name, d in CONFIGS:
        config = getattr(configs, name)
        config = config[d] if isinstance(config, dict) else config
        label = f"{name}, d = {d}"
        shared[label] = {tensor: nbytes / 1024 for tensor, nbytes in config.shared.items()}
        registers[label] = registers_of(config)
    limit = chips.H200.shared_per_block / 1024
    return dict(shared=shared, registers=registers, producer=PRODUCER_REGISTERS, limit=limit, file=REGISTER_FILE)


def registers_of(config: configs.ForwardConfig) -> list[int]:
    """Return the number of registers per thread for each consumer.

    All warpgroups start with the same number of registers, a multiple of 8. Consumer 0 gets the registers that the
    other warpgroups do not use.
    """
    start = REGISTER_FILE // (128 * (config.consumers + 1)) // 8 * 8
    other_registers = [config.registers] * (config.consumers - 1)
    return [start * (config.consumers + 1) - sum(other_registers) - PRODUCER_REGISTERS, *other_registers]


AXIS_END = 1.3  # the axis ends at this multiple of the limit


@style.picture
def draw(
    shared: dict[str, dict], registers: dict[str, list[int]], producer: int, limit: float, file: int
) -> style.Drawn:
    """For each configuration, draw one bar for shared memory and one for registers, against the SM's limits.

    `shared` is {configuration: {tensor: KiB}}. `registers` is {configuration: each consumer's registers per thread},
    and `producer` is the number of registers per producer thread. `limit` is the shared memory that a program can use,
    in KiB, and `file` is the number of registers in an SM's register file.
    """
    caption = (
        "An SM has no room for a second program (dashed) beside the first. The upper bars are the KiB of the buffers of"
        f" Q, K and V, and of O if it has its own buffer. A program can use {limit:.0f} KiB of an SM. The lower bars"
        f" are the registers of all threads, 128 threads per consumer. An SM has {file:,} registers. The dashed boxes"
        " are cut off."
    )
    figure, (above, below) = style.new_figure(3.7, caption, nrows=2)
    for y, parts in enumerate(shared.values()):
        x = 0.0
        for tensor, size in parts.items():
            words = tensor if style.is_narrow() and size < 0.25 * limit else f"{tensor} {size:.0f}"
            style.tensor_box(above, x, y + 0.1, size, 0.8, tensor, words, linewidth=0.9)
            x += size
        _draw_second_program(above, x, y, limit)
    for y, per_consumer in enumerate(registers.values()):
        for c, n in enumerate(per_consumer):
            words = f"{n} per thread" if not style.is_narrow() else f"{n}"
            style.box(
                below, 128 * sum(per_consumer[:c]), y + 0.1, 128 * n, 0.8, words, style.worker_color(3), linewidth=0.9
            )
        style.box(
            below, 128 * sum(per_consumer), y + 0.1, 128 * producer, 0.8, "", hatch=style.MASK_HATCH, linewidth=0.9
        )
        _draw_second_program(below, 128 * (sum(per_consumer) + producer), y, file)
    for ax, most, limits, title in (
        (above, limit, f"limit: {limit:.0f} KiB", "Shared memory, KiB"),
        (below, file, f"limit: {file:,}", "Registers (hatched: of the producer)"),
    ):
        ax.plot([most, most], [0, len(shared)], color=style.INK, linewidth=2.4)
        left = (1.06 if style.is_narrow() else 0.37) * most
        for y, name in enumerate(shared):
            style.note(ax, -0.03 * most, y + 0.5, name, ha="right")
        style.note(ax, most, -0.25, limits, ha="center")
        style.strip_axes(ax, (-left, AXIS_END * most), (-0.5, len(shared)))
        ax.set_title(title)
    usage = "; ".join(f"{name} {sum(parts.values()):.0f} KiB, {128 * (sum(registers[name]) + producer):,} registers"
                     for name, parts in shared.items())  # fmt: skip
    return (
        figure,
        f"Stacked bars of what a program takes of the {limit:.0f} KiB and {file:,} registers of an SM: {usage}.",
    )


def _draw_second_program(ax: style.Axes, start: float, y: float, most: float) -> None:
    """Draw a dashed box for a second program, which begins at x = `start`, where the first program ends.

    The box continues beyond the edge of the picture. `most` is the total amount of the resource on an SM.
    """
    end = AXIS_END * most
    look = dict(color=style.QUIET, linestyle=style.DASHED, linewidth=1)
    ax.plot([end, start, start, end], [y + 0.1, y + 0.1, y + 0.9, y + 0.9], **look)
    words = "2nd" if style.is_narrow() else "2nd program"
    style.note(ax, (most + end) / 2, y + 0.5, words, ha="center", color=style.QUIET)
