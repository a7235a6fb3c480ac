"""The front pages: links lead somewhere, commands exist, code and numbers are those of the package and its records."""

import doctest
import json
import re
import runpy
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import fa2_lab
from fa2_lab.paper import LINES, where
from fa2_lab.tools import command
from fa2_studio.bench import readme
from fa2_studio.book import questions
from fa2_studio.book.chapters import written

PROJECT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "API.md", "QUESTIONS.md", "RESULTS.md", "TROUBLESHOOTING.md", "CONTRIBUTING.md")


def read_page(name: str = "README.md") -> str:
    return (PROJECT / name).read_text(encoding="utf-8")


def section(title: str, name: str = "README.md") -> str:
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", read_page(name), re.DOTALL | re.MULTILINE)[1]


@cache
def commands() -> set[str]:
    """Return the names of all commands that the command line has."""
    done = subprocess.run([sys.executable, "-m", "fa2_lab", "--help"], capture_output=True, text=True, timeout=60)
    return set(re.findall(r"^    ([a-z]+) ", done.stdout, re.MULTILINE))


def named_commands(words: str) -> set[str]:
    return set(re.findall(r"(?:fa2-lab|python -m fa2_lab) ([a-z]+)", words))


PLAIN = {r"_{\mathrm{new}}": "_new", "_{ij}": "_ij", r"\leftarrow": "←", r"\ell": "l"}
PLAIN |= {"^{": "^(", "}": ")", " - ": " − "}


def test_readme_example_equals_the_where_command():
    shown = section("One line of the paper")
    tag = re.search(r"fa2_lab where (\S+)`", shown)[1]
    found = where(tag)
    line = re.search(r"^> (.*)", shown, re.MULTILINE)[1].replace("$", "")
    for tex, plain in PLAIN.items():
        line = line.replace(tex, plain)
    assert line == LINES[tag][1].text
    code = re.findall(r"\]\((\S+\.py)\):\n\n```python\n(.*?)\n```", shown, re.DOTALL)
    assert code == [(place.file, place.text) for place in (found.first_numpy[0], found.first_triton[0])]
    assert f'src="figures/{found.picture}.svg"' in shown


def test_readme_generated_parts_are_up_to_date():
    for part, content in readme.readme_parts().items():
        assert readme.replace_part(read_page(), part, content) == read_page(), "run `python -m fa2_lab bench --results`"


def test_citation_version_equals_the_package_version():
    assert f"version {fa2_lab.__version__}," in section("The papers")
    assert f"\nversion: {fa2_lab.__version__}\n" in read_page("CITATION.cff")
    assert f"\n## {fa2_lab.__version__}" in read_page("CHANGELOG.md")


@pytest.mark.parametrize("name", PAGES)
def test_documented_commands_exist(name):
    assert named_commands(read_page(name)) <= commands()


def test_command_table_is_complete():
    assert len(commands()) > 6 and commands() == named_commands(section("Commands", "TROUBLESHOOTING.md"))


def test_readme_lists_every_chapter():
    rows = [line for line in read_page().splitlines() if line.startswith("| [")]
    assert rows == [f"| [{c.number} · {c.title}](notebooks/{c.name}.ipynb) | {c.question} |" for c in written()]


def anchors_of(name: str) -> set[str]:
    """Return the anchors of a page or a chapter: its headings in lower case, with dashes."""
    words = read_page(name)
    if name.endswith(".ipynb"):
        words = "\n".join(
            "".join(cell["source"]) for cell in json.loads(words)["cells"] if cell["cell_type"] == "markdown"
        )
    return set(map(questions.heading_anchor, re.findall(r"^#+ (.*)", words, re.MULTILINE)))


@pytest.mark.parametrize("name", PAGES)
def test_documentation_links_resolve(name):
    for target in re.findall(r"\]\(([^)]+)\)", read_page(name)):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            assert not file or (PROJECT / file).exists(), target
            assert not anchor or anchor in anchors_of(file or name), target


def test_api_md_examples_print_what_they_show():
    words = read_page("API.md")
    if find_spec("transformers") is None:
        words = re.sub(r"^## transformers$.*?(?=^## )", "", words, flags=re.DOTALL | re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(words, {}, "API.md", "API.md", 0)
    found = doctest.DocTestRunner().run(examples)
    assert found.attempted > 30 and found.failed == 0


def test_readme_shows_what_examine_prints(tmp_path, capsys):
    """The function is that of chapter C."""
    cells = (PROJECT / "notebooks" / "text" / "C_package.py").read_text(encoding="utf-8").split("# %%")
    mine = next(cell for cell in cells if "def mine(q, k, v" in cell).split("report = ")[0]
    (tmp_path / "mine.py").write_text(f"import numpy as np\n{mine.removeprefix(' [markdown]')}", encoding="utf-8")
    shown = re.search(r"fa2-lab examine mine\.py:attention`.*?```text\n(.*?)```", read_page(), re.DOTALL)[1]
    assert command.main(["examine", f"{tmp_path / 'mine.py'}:mine", "--quick"]) == 1
    assert shown in capsys.readouterr().out


def test_questions_md_lists_every_question():
    titles = re.findall(r"^##+ (.*)", read_page("QUESTIONS.md"), re.MULTILINE)
    assert re.findall(r"\[(.*)\]\(#", read_page("QUESTIONS.md").split("\n## ")[0]) == titles


CODE_AND_OUTPUT = r"^```python\n(.*?)^```\n\n```text\n(.*?)^```"
ANSWERS = re.findall(CODE_AND_OUTPUT, read_page("QUESTIONS.md"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("code", "shown"), ANSWERS, ids=range(len(ANSWERS)))
def test_questions_md_code_prints_what_it_shows(code, shown, tmp_path, capsys):
    file = tmp_path / "answer.py"  # a file, because Triton reads the source of its functions
    file.write_text(code, encoding="utf-8")
    runpy.run_path(str(file))
    assert capsys.readouterr().out == shown


def test_contributing_md_names_existing_paths():
    named = re.findall(r"`((?:fa2_lab|fa2_studio|tests|notebooks|\.github)/[^\s`*]*)`", read_page("CONTRIBUTING.md"))
    assert len(named) > 15
    assert [name for name in named if "NN" not in name and not (PROJECT / name).exists()] == []
