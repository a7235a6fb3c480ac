"""Diagram of the matmuls for one tile if the gradients are computed in one pass or in two passes."""

from fa2_lab.plots import style


def data() -> dict:
    """Return the argument of draw(): the matmuls of each pass in order, for one pass and for two passes."""
    one, columns, rows = ["S", "dP", "dV", "dK", "dQ"], ["S", "dP", "dV", "dK"], ["S", "dP", "dQ"]
    return dict(variants={"one pass": [one], "two passes": [columns, rows]})


@style.picture
def draw(variants: dict[str, list[list[str]]]) -> style.Drawn:
    """For each way to compute the gradients, draw a row with a box for each matmul.

    A box is hatched if an earlier pass has already computed the same matmul. `variants` is {name: list of passes},
    where a pass is the list of its matmuls.
    """
    counts = {name: sum(map(len, passes)) for name, passes in variants.items()}
    saved = counts["two passes"] - counts["one pass"]
    caption = f"One pass saves {saved} matmuls of {counts['two passes']}, because S and dP are computed only once."
    figure, ax = style.new_figure(
        1.25, f"{caption} A hatched box was computed before. The second pass also computes the exponentials of P again."
    )
    for y, (name, passes) in enumerate(variants.items()):
        computed: list[str] = []
        for tensor in (tensor for each in passes for tensor in each):
            look, words = (dict(hatch=style.MASK_HATCH), f"{tensor}\nagain") if tensor in computed else ({}, tensor)
            style.tensor_box(ax, len(computed), y + 0.12, 0.94, 0.76, tensor, words, **look)
            computed.append(tensor)
        style.note(ax, -0.1, y + 0.5, f"{name}: {len(computed)}", ha="right")
    style.strip_axes(ax, (-(2.2 if style.is_narrow() else 1.4), max(counts.values())), (0, len(variants)))
    order = "; ".join(
        f"{name}: {', then '.join(', '.join(each) for each in passes)}" for name, passes in variants.items()
    )
    return (
        figure,
        f"Two rows of boxes, one for each matmul of a tile. {order}. S and dP of the second pass are hatched.",
    )
