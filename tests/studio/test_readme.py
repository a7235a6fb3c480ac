"""The front door: links lead somewhere, commands exist, code and numbers are those of the package and its records."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fa2_lab
from fa2_lab.paper import LINES, where
from fa2_lab.records import load
from fa2_lab.tools import ladder
from fa2_studio.bench import page
from fa2_studio.book import reach
from fa2_studio.book.chapters import written

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT / "fa2_lab"
DOORS = ("README.md", "RESULTS.md", "TROUBLESHOOTING.md", "CONTRIBUTING.md")


def door(name: str = "README.md") -> str:
    return (PROJECT / name).read_text(encoding="utf-8")


def part(title: str, name: str = "README.md") -> str:
    """One section of a file."""
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", door(name), re.DOTALL | re.MULTILINE)[1]


# What the README shows ------------------------------------------------------------------------------------------


def test_the_readme_is_short():
    folded = "<!-- ladder:.*<!-- end of ladder -->"  # a table that is opened by who wants it
    assert len(re.sub(folded, "", door(), flags=re.DOTALL).splitlines()) <= 120


def shown() -> dict[str, str]:
    """{file: line of code} that the README shows for its line of the paper."""
    section = part("One line of the paper")
    return {file: code for file, code in re.findall(r"\]\((\S+\.py)\):\n\n```python\n(.*?)\n```", section, re.DOTALL)}


def test_the_line_of_the_paper_and_its_code_are_what_where_finds():
    section = part("One line of the paper")
    tag = re.search(r"fa2_lab where (\S+)`", section)[1]
    words = re.search(r"^> (.*)", section, re.MULTILINE)[1]
    assert words == LINES[tag][1].text
    found = where(tag)
    read_first = (found.first_numpy[0], found.first_triton[0])
    assert list(shown().items()) == [(place.file, place.text) for place in read_first]
    assert f"(figures/{found.picture}.svg)" in section


def test_the_table_of_rungs_and_the_sentence_on_speed_are_the_records():
    said = dict(ladder="\n".join(ladder.markdown(load("ladder"))), speed=page.sentence(load("paper")))
    for part_of_it, text in said.items():
        assert page.renewed(door(), part_of_it, text) == door(), "run `python -m fa2_lab bench --results`"


def test_the_table_of_machines_is_made_from_the_chapters():
    assert f"-->\n{reach.table()}\n<!-- end of machines -->" in door(), "run `python -m fa2_studio.book.reach`"


def test_the_version_to_cite_is_the_version():
    assert f"version {fa2_lab.__version__}," in part("The papers")


# Commands -----------------------------------------------------------------------------------------------------


def commands_in(text: str) -> set[str]:
    """The commands of the package that a text names: `fa2-lab NAME`, `python -m fa2_lab NAME`."""
    return set(re.findall(r"(?:fa2-lab|python -m fa2_lab) ([a-z]+)", text))


def test_the_readme_has_the_two_commands():
    block = re.search(r"^```bash\n(.*?)^```", door(), re.DOTALL | re.MULTILINE)[1].splitlines()
    assert block == ["pip install -c constraints.txt -e '.[dev]' && python -m fa2_lab", "python -m pytest"]


@pytest.mark.parametrize("name", DOORS)
def test_commands_that_are_named_exist(name):
    done = subprocess.run([sys.executable, "-m", "fa2_lab", "--help"], capture_output=True, text=True, timeout=60)
    exist = set(re.findall(r"^ +([a-z]+) ", done.stdout, re.MULTILINE))
    assert commands_in(door(name)) <= exist


def test_every_command_is_in_the_table():
    done = subprocess.run([sys.executable, "-m", "fa2_lab", "--help"], capture_output=True, text=True, timeout=60)
    exist = set(re.findall(r"^    ([a-z]+) ", done.stdout, re.MULTILINE))
    assert len(exist) > 6 and exist == commands_in(part("Commands", "TROUBLESHOOTING.md"))


# Chapters and links -------------------------------------------------------------------------------------------


def test_the_readme_lists_every_chapter():
    rows = [line for line in door().splitlines() if line.startswith("| [")]
    chapters = [f"| [{c.name.split('_')[0]} · {c.title}](notebooks/{c.name}.ipynb) | {c.question} |" for c in written()]
    assert rows == chapters


def anchors(text: str) -> set[str]:
    """What can be linked to in a page: its headings in lower case, with dashes."""
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^#+ (.*)", text, re.M)}


@pytest.mark.parametrize("name", DOORS)
def test_every_link_leads_somewhere(name):
    targets = re.findall(r"\]\(([^)]+)\)", door(name))
    assert targets or name == "TROUBLESHOOTING.md"
    for target in (target for target in targets if "://" not in target):
        file, _, anchor = target.partition("#")
        assert not file or (PROJECT / file).exists(), target
        assert not anchor or anchor in anchors(door(file or name)), target


def test_the_layout_is_the_house():
    from test_house import FLOORS, room_of

    rows = re.findall(r"^\| (\d) \| (`.*?`) \|", part("The house", "CONTRIBUTING.md"), re.MULTILINE)
    floors = {name.strip("`"): int(floor) for floor, names in rows for name in names.split(", ")}
    assert len(floors) >= 10
    for name, floor in floors.items():
        assert (PACKAGE / name).exists(), f"CONTRIBUTING.md speaks of {name}"
        assert FLOORS[room_of(f"fa2_lab.{name.removesuffix('.py').rstrip('/')}")] == floor, name


def test_the_papers_are_told_apart_by_their_numbers():
    numbers = re.findall(r"arXiv:(\d{4}\.\d{5})", part("The papers"))
    assert {"2205.14135", "2307.08691", "2407.08608", "1805.02867", "2112.05682"} == set(numbers)
    more = re.findall(r"arXiv:(\d{4}\.\d{5})", part("Sources", "CONTRIBUTING.md"))
    assert len(numbers + more) == len(set(numbers + more)) > 9
