"""Diagram of which warps wait for which others in a thread block of the Hopper kernels, with one row per ring."""

import textwrap

from fa2_lab.plots import style


def data(direction: str = "forward") -> dict:
    """Return {ring: (stages, number of consumers that must release a stage before it is filled again)} for a pass.

    `direction` is "forward" or "backward". The forward pass is shown with the rings of TWO_CONSUMERS in
    hopper/forward/configs.py. V's ring needs no releases of its own, because a release of a stage of K also shows that
    V's corresponding stage is empty.
    """
    rings = {
        "forward": {"mailbox": (2, 2), "Q": (4, 1), "K": (3, 2), "V": (3, 0)},
        "backward": {"mailbox": (2, 2), "K": (2, 2), "V": (1, 2), "rows": (2, 2)},
    }
    return dict(direction=direction, rings=rings[direction])


# In data units: the producer's right edge, the left and right edges of the stages, and the consumers' left edge.
PAGE = (1.1, 2.05, 3.85, 4.8)
PHONE = (0.72, 1.14, 2.52, 3.05)
ROW_HEIGHT, STAGE_HEIGHT = 0.62, 0.32
LOOKS = {"mailbox": ("m", "mailbox"), "rows": ("Q", "Q, dO")}  # {ring: (tensor in whose colour it is drawn, name)}


BETWEEN_CONSUMERS = {
    "forward": "each waits until the other's matmuls have started (ping-pong)",
    "backward": "both write their halves of dS into one buffer and read all of it, with one buffer for even steps and"
    " one for odd steps",
}
HEADLINES = {
    "forward": "The producer waits until a stage is empty, and the consumers wait until it is full.",
    "backward": "In the backward pass, each consumer also waits for the other's half of dS.",
}
LAST_SENTENCES = {"forward": "", "backward": " The rings on the left work as in the forward pass."}


@style.picture
def draw(direction: str, rings: dict[str, tuple[int, int]]) -> style.Drawn:
    """Draw one thread block of the forward or backward kernel."""
    caption = (
        f"{HEADLINES[direction]} A solid arrow means that all bytes are there. A dashed arrow means that the given"
        f" number of consumers has released the stage.{LAST_SENTENCES[direction]}"
    )
    figure, ax = style.new_figure(0.2 + ROW_HEIGHT * (len(rings) + 1), caption)
    _draw_block(ax, direction, rings)
    stages = "; ".join(
        f"{LOOKS.get(ring, (ring, ring))[1]}: {style.count_with_noun(n, 'stage')}" for ring, (n, _) in rings.items()
    )
    alt = (
        f"One thread block of the {direction} kernel. The producer warp is on the left, and the two consumer warpgroups"
        " are on the right. Between them is a row for each ring of buffers in shared memory, with a solid arrow for"
        f" full and a dashed arrow back for empty. {stages}. Between the consumers: {BETWEEN_CONSUMERS[direction]}."
    )
    return figure, alt


def _draw_block(ax: style.Axes, direction: str, rings: dict[str, tuple[int, int]]) -> None:
    """Draw the producer, the rings and the consumers, with a pair of arrows on each side of a ring."""
    producer, left, right, consumers = PHONE if style.is_narrow() else PAGE
    bottom, end = ROW_HEIGHT * len(rings) + 0.1, style.width_in_units() - 0.1
    style.box(ax, 0.02, 0, producer - 0.02, bottom, "producer\n\n1 warp\ncopies", style.worker_color(3))
    style.box(ax, consumers, 0, end - consumers, bottom, fill=style.tint(style.worker_color(3)))
    space = "\n" if style.is_narrow() else " "
    high, wide = (0.36 if direction == "forward" else 0.31) * bottom, end - consumers - 0.1
    gap = "\n" if direction == "backward" and style.is_narrow() else "\n\n"
    for c, y in enumerate((0.05, bottom - high - 0.05)):
        style.box(
            ax, consumers + 0.05, y, wide, high, f"consumer{space}{c}{gap}4 warps\ncompute", style.worker_color(3)
        )
    middle, low, top = (consumers + end) / 2, 0.08 + high, bottom - high - 0.08
    for c, x in enumerate((middle - 0.23, middle + 0.23)):
        start, stop = (top, low) if c else (low, top)
        if direction == "forward":
            style.arrow(ax, (x, start), (x, stop), linewidth=2)
        else:
            style.arrow(ax, (x, low), (x, bottom / 2 - 0.2), style="<|-|>", linewidth=2)
            style.arrow(ax, (x, bottom / 2 + 0.2), (x, top), style="<|-|>", linewidth=2)
            label = f"dS\n{('even', 'odd')[c]}"
            style.tensor_box(ax, x - 0.21, bottom / 2 - 0.2, 0.42, 0.4, "dS", label, linewidth=1.8)
    if direction == "forward":
        ground = style.TEXT_BACKGROUND | dict(facecolor=style.tint(style.worker_color(3)))
        style.note(ax, middle, bottom / 2, "turns", ha="center", bbox=ground)
    for lane, (ring, (number, releases)) in enumerate(rings.items()):
        y, wide = ROW_HEIGHT * (lane + 0.5) + 0.05, (right - left) / number
        tensor, name = LOOKS.get(ring, (ring, ring))
        for stage in range(number):
            label = name if style.is_narrow() and len(name) > 1 else f"{name} {stage}"
            place = (left + stage * wide, y - STAGE_HEIGHT / 2, wide - 0.05, STAGE_HEIGHT)
            if direction == "forward":
                style.tensor_box(ax, *place, tensor, label)
            else:
                style.box(ax, *place, label, style.MASKED, edgecolor=style.QUIET)
        color = style.INK if direction == "forward" else style.QUIET
        for start, stop in ((producer, left), (right, consumers)):
            style.arrow(ax, (start + 0.03, y - 0.08), (stop - 0.05, y - 0.08), color)
            if releases:
                style.arrow(ax, (stop - 0.05, y + 0.1), (start + 0.03, y + 0.1), color, linestyle=(0, (3, 2)))
        words = style.count_with_noun(releases, "release") if releases else "freed with K"
        if style.is_narrow():
            words = f"{releases} ×" if releases else words.replace(" ", "\n", 1)
        style.note(ax, (right + consumers) / 2, y + 0.21, words, ha="center")
        style.note(ax, (right + consumers) / 2, y - 0.18, "full", ha="center")
    style.note(
        ax,
        0.02,
        bottom + 0.15,
        textwrap.fill(f"Between them: {BETWEEN_CONSUMERS[direction]}.", 44 if style.is_narrow() else 90),
        va="top",
    )
    style.strip_axes(ax, (0, style.width_in_units() - 0.08), (-0.05, bottom + (0.55 if style.is_narrow() else 0.35)))
