"""The front door: every message of the package is in the README, and every one quoted there exists; so are chapters."""

import ast
import re
from pathlib import Path

from fa2_lab.studio.bench.readme import ratios
from fa2_lab.studio.bench.results import load
from fa2_lab.studio.book.chapters import written

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = PROJECT / "fa2_lab"
CAUGHT = {"an unknown order of arguments", "an earlier call on this group has lost a rank"}  # inside the package
TO_STUDENTS = {"Failed", "NotAllowed", "Borrowed"}  # what a grader says of a submission; INSTRUCTOR.md tells of it


def readme() -> str:
    return (PROJECT / "README.md").read_text(encoding="utf-8")


def part(title: str) -> str:
    """One section of the README."""
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", readme(), re.DOTALL | re.MULTILINE)[1]


# Messages -----------------------------------------------------------------------------------------------------


def template(node: ast.expr) -> str:
    """A message with … wherever something is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return re.sub("…+", "…", "".join(template(part) for part in node.values))
    return "…"


def name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def said_in(source: str) -> set[str]:
    """Messages of what a source raises, warns of, prints to stderr, or keeps in `why` until it raises it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            if name_of(node.exc.func) not in TO_STUDENTS:
                found.add(template(node.exc.args[0]))
        elif isinstance(node, ast.Call) and node.args:
            to_stderr = name_of(node.func) == "print" and any(k.arg == "file" for k in node.keywords)
            if to_stderr or name_of(node.func) == "warn":
                found.add(template(node.args[0]))
        elif isinstance(node, ast.Assign) and name_of(node.targets[0]) == "why":
            found.add(template(node.value))
        elif isinstance(node, ast.FunctionDef) and node.name == "misfit_of":
            found |= {template(x.value) for x in ast.walk(node) if isinstance(x, ast.Return)}
    return {
        text for text in found if re.search(r"[A-Za-z]{3}", text.replace("fa2-lab course", "").replace("fa2-lab", ""))
    }


def is_about_an_argument(message: str) -> bool:
    return ": got " in message or "it takes" in message or message.startswith("tune: --d takes")


def messages() -> set[str]:
    """All that the package can say, but for arguments that it refuses."""
    said = set().union(*(said_in(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")))
    return {message for message in said - CAUGHT if not is_about_an_argument(message)}


def quoted() -> set[str]:
    """The messages in the first column of the README's table."""
    rows = [line.split(" | ")[0] for line in part("When something goes wrong").splitlines() if line.startswith("| `")]
    return {span.removesuffix(" ") for row in rows for _, span in re.findall(r"(`+)(.+?)\1(?!`)", row)}


def test_every_message_is_in_the_readme():
    assert sorted(messages() - quoted()) == []


def test_every_message_in_the_readme_exists():
    assert len(quoted()) > 20
    assert sorted(quoted() - messages()) == []


def test_messages_are_found_however_they_are_said():
    source = """
def f(x):
    why = "it is late"
    warnings.warn(f"slow: {x}")
    print("no GPU", file=sys.stderr)
    print("a result")
    raise RuntimeError(f"{x}{x} broke: {why}") from x
    raise ValueError(f"{x}")
    raise Failed("to a student")
"""
    assert said_in(source) == {"it is late", "slow: …", "no GPU", "… broke: …"}
    assert is_about_an_argument("q: got 3; it takes a tensor") and not is_about_an_argument("no GPU here")


# What the first lines claim ------------------------------------------------------------------------------------


def test_the_first_lines_say_what_the_record_says():
    lead, rows = readme().partition("![")[0], load("paper").rows
    assert f"all {len(rows)} rows" in lead and len(written()) == 16
    for peer in ("cuDNN", "torch flash"):
        assert len(ratios(rows, "fa2_lab", peer)) == len(rows) and min(ratios(rows, "fa2_lab", peer)) > 1
    ahead = {}
    for direction in ("forward", "backward"):
        found = ratios([row for row in rows if row.direction == direction], "fa2_lab", "FlashAttention-4")
        ahead[direction] = sum(x > 1 for x in found), len(found)
    assert ahead["forward"] == (24, 24) and "forward they are faster than FlashAttention-4 on all 24" in lead
    assert "backward on {} of {}".format(*ahead["backward"]) in lead


# Chapters and links -------------------------------------------------------------------------------------------


def test_the_ladder_lists_every_chapter():
    rows = [line for line in part("The ladder").splitlines() if line.startswith("| [")]
    chapters = [f"| [{c.name[:2]} · {c.title}](notebooks/{c.name}.ipynb) | {c.question} |" for c in written()]
    assert rows == chapters


def test_every_link_leads_somewhere():
    targets = re.findall(r"\]\(([^)]+)\)", readme())
    assert len(targets) > 15
    missing = [t for t in targets if "://" not in t and not (PROJECT / t.partition("#")[0]).exists()]
    assert missing == []


def test_the_papers_are_told_apart_by_their_numbers():
    numbers = re.findall(r"arXiv:(\d{4}\.\d{5})", part("The papers, and how to cite"))
    assert {"2205.14135", "2307.08691", "2407.08608", "1805.02867", "2112.05682"} <= set(numbers)
    assert len(numbers) == len(set(numbers))
