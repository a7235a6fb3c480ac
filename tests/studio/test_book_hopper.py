"""The exercise of chapter 12a names what is wrong with a kernel and accepts the right one; listings of the kernels."""

import ast
import re

import pytest

from fa2_lab.paper import PACKAGE
from fa2_studio.book import hopper, maxima, orders

MISTAKES = {  # a change of the solution, and what must be said of it
    ("tma.async_load(K, [64 * j, 0], arrived, k)", "pass"): "tile 0: it waits forever",
    ("mbarrier.expect(arrived, K.block_type.nbytes)", "pass"): "tile 0: the barrier was not told",
    ("mbarrier.wait(arrived, (j + 1) & 1)", "pass"): "a tile was read while its copy was still on its way",
    ("(j + 1) & 1", "j & 1"): "tile 0: phase 0 was over before the copy arrived",
    ("gl.max(s, 1)", "gl.max(s, 0)"): "it runs, but its maxima are those of the columns",
    ("k.permute((1, 0))", "k"): "it runs, but its scores are q k.",
    ("64 * j", "j"): "it runs, but its maxima are wrong",
    ("[64 * j, 0]", "[0, 64 * j, 0]"): "tile 0: K is two-dimensional here",
    ("k.permute((1, 0))", "k.T"): "tile 0: shared memory has no .T",
    ("s = warpgroup_mma_wait(0, deps=[s])", "pass"): "tile 0: the matmul may still be running",
    ("mma_wait(0", "mma_wait(1"): "tile 0: the matmul may still be running",
}


def kernel_source(body: str) -> str:
    return "def tile_maxima(j, q, k, K, arrived, zero):\n    " + body.replace("\n", "\n    ") + "\n"


@pytest.mark.parametrize("change", MISTAKES, ids=lambda change: change[0].split("(")[0])
def test_chapter_12a_exercise_names_a_mistake(change):
    assert maxima.check_kernel(kernel_source(maxima.SOLUTION.replace(*change))).startswith(MISTAKES[change])


def test_chapter_12a_exercise_accepts_its_solution():
    for empty in (kernel_source("..."), "def tile_maxima(j, q, k, K, arrived, zero): ...\n"):
        assert maxima.check_kernel(empty).startswith("your turn: write tile_maxima")
    assert maxima.check_kernel(kernel_source(maxima.SOLUTION)).startswith("right")
    at_once = maxima.SOLUTION.replace(", is_async=True", "").replace("s = warpgroup_mma_wait(0, deps=[s])", "")
    named = maxima.SOLUTION.replace("max(s, 1)", "max(s, axis=1)").replace("nbytes)", "nbytes, pred=True)")
    for other in (at_once, named):  # Gluon waits for a product unless asked not to
        assert maxima.check_kernel(kernel_source(other)).startswith("right")


def ignores_other_ds(block, ds_filled, T):
    """Run a step that waits for everything except the other consumer's dS."""
    for n in range(T):
        for unit, what in ("tensor", "S"), ("exp", "P"), ("tensor", "dP"), ("tensor", "dK"), ("tensor", "dQ"):
            yield block.start(unit, 256, f"{what} {n}").done()


def never_waits(block, ds_filled, T):
    """Run a step that arrives at ds_filled long before dQ, but does not wait for the other consumer."""
    for n in range(T):
        for unit, what in ("tensor", "S"), ("exp", "P"), ("tensor", "dP"):
            yield block.start(unit, 256, f"{what} {n}").done()
        ds_filled.arrive(block.actor)
        for unit, what in ("tensor", "dV"), ("tensor", "dK"), ("tensor", "dQ"), ("copy", "add dQ"):
            yield block.start(unit, 256, f"{what} {n}").done()


def computes_only_s(block, ds_filled, T):
    """Run a step that computes only S."""
    for n in range(T):
        yield block.start("tensor", 256, f"S {n}").done()


def k_ahead(K, V, T):
    """Run a producer that copies K ahead of V, as the kernel does."""
    for n in range(T):
        yield K.acquire(n)
        yield from K.copy(n)
        if n > 0:
            yield from V.copy(n - 1)
    yield K.acquire(T)
    yield from V.copy(T - 1)


def v_with_k(K, V, T):
    """Run a producer that copies V together with K, over a tile of V that may not have been read."""
    for n in range(T):
        yield K.acquire(n)
        yield from K.copy(n)
        yield from V.copy(n)


def one_tile_less(K, V, T):
    """Run a producer that forgets the last tile."""
    for n in range(T - 1):
        yield K.acquire(n)
        yield from K.copy(n)
        if n > 0:
            yield K.acquire(n + 1)
        yield from V.copy(n)


def yields_copy(K, V, T):
    """Run a producer that yields a copy instead of a wait."""
    yield K.acquire(0)
    yield K.copy(0)


HANGS = "with stages = 1, no actor can go on: "


@pytest.mark.parametrize(
    "check, order, mistake",
    [
        (orders.check_step, never_waits, "consumer 0 starts dQ 0 before P 0 of consumer 1 has ended"),
        (orders.check_copies, k_ahead, f"{HANGS}the producer waits for room for K's tile 1; consumer 0 waits for V's"),
        (orders.check_copies, v_with_k, "with stages = 1, V's tile 0 was overwritten by tile 1 before consumer 1"),
        (orders.check_copies, one_tile_less, f"{HANGS}the producer has ended; consumer 0 waits for K's tile 3"),
        (orders.check_copies, yields_copy, "with stages = 1, you yielded a copy"),
        (orders.check_step, ignores_other_ds, "consumer 0 starts dQ 0 before both consumers have arrived"),
        (orders.check_step, computes_only_s, "consumer 0 leaves out P 0"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_chapter_12b_and_13_exercises_reject_wrong_orders(check, order, mistake, capsys):
    check(order)
    assert capsys.readouterr().out.startswith(f"wrong: {mistake}")


def test_chapter_13_exercise_reports_a_right_but_unrequested_order(capsys):
    def waited_for(block, ds_filled, T):
        for n in range(T):
            for unit, what in ("tensor", "S"), ("exp", "P"), ("tensor", "dV"), ("tensor", "dP"):
                yield block.start(unit, 256, f"{what} {n}").done()
            ds_filled.arrive(block.actor)
            yield ds_filled.over(n & 1)
            for unit, what in ("tensor", "dK"), ("tensor", "dQ"), ("copy", "add dQ"):
                yield block.start(unit, 256, f"{what} {n}").done()

    orders.check_step(waited_for)
    says = capsys.readouterr().out
    assert says.startswith("the operands are right, but the task is not done: S and dP are not started together")
    assert "waits for its own addition" in says


def test_hopper_listing_omits_disabled_branches():
    assert hopper.without_branches(["if a:", "    x", "else:", "    y", "z"], "a") == ["y", "z"]
    nested = ["if b:", "    if a and c:", "        x", "    y", "else:", "    z"]
    assert hopper.without_branches(nested, "a") == ["if b:", "    y", "else:", "    z"]


TAG = r"FA2[.]\w+[.]L\d+"


def test_a_listing_with_shorter_lines_is_the_same_code():
    for file in (PACKAGE / "kernels" / "hopper").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        shown = "\n".join(hopper.fit_lines(text))
        first, second = (re.sub(r"\s+", " ", ast.unparse(ast.parse(code))) for code in (text, shown))
        assert first == second and sorted(re.findall(TAG, text)) == sorted(re.findall(TAG, shown))


def test_a_long_comment_in_a_listing_is_wrapped_as_one_paragraph():
    words = " ".join(["word"] * 30)
    lines = [f"    # {words}", "    # its end.", "    x = 1"]
    shown = hopper.fit_lines("\n".join(lines))
    assert " ".join(line.strip().removeprefix("# ") for line in shown[:-1]) == f"{words} its end."
    assert len(shown) == 3 and shown[-1] == "    x = 1"
    as_diff = hopper.fit_lines("\n".join(f"+ {line}" for line in lines), edge=2)
    assert as_diff == [f"+ {line}" for line in shown]
