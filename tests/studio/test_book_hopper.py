"""The exercise of chapter 12a says what is wrong with a kernel, and takes the right one; listings of the kernels."""

import pytest

from fa2_studio.book import hopper, maxima, orders

WRONG = {  # a change of the solution, and what must be said of it
    ("tma.async_load(K, [64 * j, 0], arrived, k)", "pass"): "tile 0: it waits for ever",
    ("mbarrier.expect(arrived, K.block_type.nbytes)", "pass"): "tile 0: the barrier was not told",
    ("mbarrier.wait(arrived, (j + 1) & 1)", "pass"): "a tile was read while its copy was on its way",
    ("(j + 1) & 1", "j & 1"): "tile 0: phase 0 was over before the copy has come",
    ("gl.max(s, 1)", "gl.max(s, 0)"): "it runs, and its maxima are those of the columns",
    ("k.permute((1, 0))", "k"): "it runs, and its scores are q k:",
    ("64 * j", "j"): "it runs, and its maxima are wrong",
    ("s = warpgroup_mma_wait(0, deps=[s])", "pass"): "tile 0: the product may still run",
    ("mma_wait(0", "mma_wait(1"): "tile 0: the product may still run",
    ("all_threads()", "pass"): "one thread may start the copy while others still read the old tile",
}


def written(body: str) -> str:
    return "def tile_maxima(j, q, k, K, arrived, zero):\n    " + body.replace("\n", "\n    ") + "\n"


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change[0].split("(")[0])
def test_the_exercise_names_a_mistake(change):
    assert maxima.judge(written(maxima.SOLUTION.replace(*change))).startswith(WRONG[change])


def test_the_exercise_takes_its_solution():
    for empty in (written("..."), "def tile_maxima(j, q, k, K, arrived, zero): ...\n"):
        assert maxima.judge(empty) == "not written yet"
    assert maxima.judge(written(maxima.SOLUTION)).startswith("right")
    at_once = maxima.SOLUTION.replace(", is_async=True", "").replace("s = warpgroup_mma_wait(0, deps=[s])", "")
    assert maxima.judge(written(at_once)).startswith("right"), "Gluon waits unless asked not to"


def hasty(block, ds_filled, T):
    """Waits for all but the other consumer's dS."""
    for n in range(T):
        for unit, what in ("tensor", "S"), ("exp", "P"), ("tensor", "dP"), ("tensor", "dK"), ("tensor", "dQ"):
            yield block.start(unit, 256, f"{what} {n}").done()


def short(block, ds_filled, T):
    """Multiplies nothing but S."""
    for n in range(T):
        yield block.start("tensor", 256, f"S {n}").done()


def careless(K, V, T):
    """Copies K without room for it."""
    for n in range(T):
        yield from K.copy(n)
        yield from V.copy(n)


@pytest.mark.parametrize(
    "judge, order, mistake",
    [
        (orders.judge_step, hasty, "consumer 0 starts dQ 0 before both have arrived"),
        (orders.judge_step, short, "consumer 0 leaves out P 0"),
        (orders.judge_copies, careless, "stages: 1; "),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_an_order_that_forgets_something_is_wrong(judge, order, mistake, capsys):
    judge(order)
    assert capsys.readouterr().out.startswith(f"wrong: {mistake}")


def test_a_listing_leaves_out_what_is_off():
    assert hopper.without(["if a:", "    x", "else:", "    y", "z"], "a") == ["y", "z"]
    nested = ["if b:", "    if a and c:", "        x", "    y", "else:", "    z"]
    assert hopper.without(nested, "a") == ["if b:", "    y", "else:", "    z"]
