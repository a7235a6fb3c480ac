"""The planted bugs ("slips") of assignment 8, and their selection by a seed. This file is not given to students.

The programs in notebooks/assignments/programs are correct. A slip replaces one piece of a program's text. The seed
determines the slip that a student gets, and the names of the program's variables.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from checks.detective import CAUSES, FIND, answer_of, changed_lines
from checks.report import Failed, Report

from fa2_studio.course.notebooks import FOLDER

PIPELINE, KERNEL = (FOLDER / "programs" / f"suspect_{name}.py" for name in ("pipeline", "kernel"))


@dataclass(frozen=True)
class PlantedBug:
    """A planted bug: its cause, the right text, and the wrong text that replaces it.

    `shows` holds the arguments of a run that reveals the bug, and `hides` those of a run that does not.
    """

    cause: str
    right: str
    wrong: str
    shows: dict
    hides: dict


FEW_TILES, SLOW_COPY, FAST_COPY = dict(tiles=2), dict(copy=4000), dict(copy=100)
RELEASE = "            emptied[stage].arrive(block.actor)\n"
UNSEEN = "                emptied[stage].arrive(block.actor)\n                continue\n"
AWAIT = "            yield pv.done()\n"
EMPTY = "            yield emptied[stage].over(phase ^ 1)\n"
HANGS = [
    PlantedBug("arrivals", 'emptied", consumers)', 'emptied", consumers + 1)', {}, FEW_TILES),
    PlantedBug("missing arrival", UNSEEN, "                continue\n", dict(causal=True), {}),
    PlantedBug("phase", EMPTY, EMPTY.replace("phase", "n & 1"), {}, dict(stages=1)),
    PlantedBug(
        "missing arrival",
        AWAIT + RELEASE,
        f"{AWAIT}            if n + stages < tiles - 1:\n    {RELEASE}",
        {},
        FEW_TILES,
    ),
]


def moved_to_top(line: str, above: str) -> tuple[str, str]:
    """Return (right, wrong): the pipeline's text from `above` to `line`, and the same text with `line` at the top."""
    text = PIPELINE.read_text(encoding="utf-8")
    first = text.index(above)
    right = text[first : text.index(line, first) + len(line)]
    spaces = above[: len(above) - len(above.lstrip())]
    return right, f"{spaces}{line.lstrip()}{right.removesuffix(line)}"


RACES = [
    PlantedBug("early release", *moved_to_top(RELEASE, AWAIT), FAST_COPY, {}),
    PlantedBug(
        "early announcement",
        *moved_to_top('        filled[stage].arrive("copy engine")\n', "            block.start("),
        {},
        FAST_COPY,
    ),
    PlantedBug("early release", *moved_to_top(RELEASE, "            s = np.where("), {}, SLOW_COPY),
]
WRONG = [
    PlantedBug("absent keys", "(col < N_k)[None, :]", "(col <= N_k)[None, :]", {}, dict(N_k=48)),
    PlantedBug(
        "lost tile", "for j in range(0, end, B_c):", "for j in range(0, end // B_c * B_c, B_c):", {}, dict(N_k=48)
    ),
    PlantedBug("wrong head", "(head * N_k + col[:, None])", "(head * N_q + col[:, None])", dict(N_k=56), {}),
    PlantedBug(
        "corner",
        "seen & (col[None, :] <= row[:, None] + N_k - N_q)",
        "seen & (col[None, :] <= row[:, None])",
        dict(N_k=56, causal=True),
        dict(causal=True),
    ),
]


# Planting a seed's bug ------------------------------------------------------------------------------------------


def bug_of_seed(bugs: list[PlantedBug], seed: int) -> PlantedBug:
    """Return the slip for a seed. Seed 0 gets the first slip."""
    return bugs[seed * 2654435761 % 2**32 * len(bugs) >> 32]


VARIABLE_NAMES = {  # {program: groups of variable names}, where a seed chooses one name from each group
    PIPELINE: (("ring", "belt", "pool"), ("filled", "full", "ready"), ("emptied", "free", "vacant"),
               ("stage", "place", "cell")),
    KERNEL: (("seen", "shown", "visible"), ("there", "exists", "inside"), ("real", "within", "alive"),
             ("alpha", "shrink", "factor")),
}  # fmt: skip


def rename_variables(path: Path, text: str, seed: int) -> str:
    """Rename a program's variables according to a seed. Seed 0 leaves the names unchanged."""
    for number, names in enumerate(VARIABLE_NAMES[path]):
        text = re.sub(rf"\b{names[0]}\b", names[seed // 3**number % 3], text)
    return text


def broken_program(path: Path, bug: PlantedBug, seed: int = 0) -> str:
    """Return a program's text with a slip planted in it, and with its variables renamed for a seed."""
    text = path.read_text(encoding="utf-8")
    if text.count(bug.right) != 1:
        raise LookupError(f"{path.name}: {bug.right!r} occurs {text.count(bug.right)} times, but it should occur once")
    return rename_variables(path, text.replace(bug.right, bug.wrong), seed).rstrip()


CASES = {"hang": (PIPELINE, HANGS, 0), "race": (PIPELINE, RACES, 1), "wrong": (KERNEL, WRONG, 2)}


def program_and_bug(step: str, seed: int) -> tuple[Path, PlantedBug]:
    """Return a step's program, and the slip that a seed plants in it."""
    path, bugs, offset = CASES[step]
    return path, bug_of_seed(bugs, seed=seed + offset if seed else 0)


def broken_cell(step: str, seed: int = 0) -> str:
    """Return a step's broken program as the text of a cell."""
    return broken_program(*program_and_bug(step, seed), seed)


def wrong_lines(path: Path, bug: PlantedBug, seed: int = 0) -> set[str]:
    """Return the lines accepted as a right answer: those that differ, or the neighbours of a missing line."""
    right = rename_variables(path, path.read_text(encoding="utf-8"), seed).splitlines()
    return changed_lines(broken_program(path, bug, seed).splitlines(), right)


def check_naming(step: str, function, seed: int = 0) -> Report:
    """Return the report on two checks that only the grader can make: the wrong line and its cause were named."""
    (path, bug), report = program_and_bug(step, seed), Report(f"{step}: line and cause")
    with report.check("find: the line", FIND[step]):
        line = str(answer_of(function, "line")).strip()
        if line not in wrong_lines(path, bug, seed):
            raise Failed("the line that is wrong", f"{line!r}, which is right"[:160])
    with report.check("name: the cause", "What does the line do to the tile, the barrier or the row?"):
        cause = answer_of(function, "cause")
        if cause != bug.cause:
            raise Failed("the cause of this mistake", f"{cause!r}: {CAUSES.get(cause, 'not in the table')}"[:160])
    return report
