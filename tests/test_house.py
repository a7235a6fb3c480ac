"""The house rules: arrows run down, tags are complete, packaging is what the README says, no talk of its makers."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from fa2_lab.paper import ALGORITHMS, LINES, TAG, tagged_lines

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = PROJECT / "fa2_lab"

# A room may import from lower floors, never from its own floor or above.
FLOORS = {
    "tiles": 1,
    "trace": 1,
    "paper": 1,
    "reference": 2,
    "machine": 3,
    "errata": 3,
    "kernels": 4,
    "attention": 5,
    "plots": 5,
    "distributed": 6,
    "gallery": 7,
    "studio": 8,
    "__main__": 9,
    "__init__": 9,
}
SAME_ROOM = {"paged": "attention"}
NEVER = {("kernels", "reference"), ("plots", "kernels")}  # downward, and still not wanted


# Arrows -------------------------------------------------------------------------------------------------------


def room_of(module: str) -> str:
    """fa2_lab.reference.fa2 → reference; fa2_lab itself → __init__."""
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "__init__"
    return SAME_ROOM.get(name, name)


def imported_modules(source: str, module: str) -> set[str]:
    """Every module of the package that a source imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])
            found |= {f"{base}.{alias.name}" for alias in node.names} if base == "fa2_lab" else {base}
    return {name for name in found if name.split(".")[0] == "fa2_lab"}


def wrong_arrows(source: str, module: str) -> list[str]:
    """What is wrong with the imports of one file."""
    here, wrong = room_of(module), []
    if here not in FLOORS:
        return [f"{here}: this room has no floor; give it one in tests/test_house.py"]
    for name in sorted(imported_modules(source, module)):
        there = room_of(name)
        if there == here:
            continue
        if FLOORS.get(there, 99) >= FLOORS[here] or (here, there) in NEVER:
            wrong.append(f"{here} imports {there}")
    return wrong


def package_modules() -> dict[str, str]:
    """{module: source} of the whole package."""
    names = {path: ".".join(path.relative_to(PROJECT).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path.read_text(encoding="utf-8") for path, name in names.items()}


def test_arrows_run_down():
    wrong = {module: wrong_arrows(source, module) for module, source in package_modules().items()}
    assert not {module: arrows for module, arrows in wrong.items() if arrows}
    assert {"tiles", "reference", "errata", "__main__"} <= {room_of(module) for module in wrong}


@pytest.mark.parametrize(
    "module, source, arrow",
    [
        ("fa2_lab.kernels.portable.forward", "from fa2_lab.reference.fa2 import forward", "kernels imports reference"),
        (
            "fa2_lab.kernels.portable.forward",
            "def f():\n    from fa2_lab import reference",
            "kernels imports reference",
        ),
        ("fa2_lab.plots.order", "import fa2_lab.kernels.portable.forward as f", "plots imports kernels"),
        ("fa2_lab.reference.fa2", "from fa2_lab.machine import io", "reference imports machine"),
        ("fa2_lab.errata.article", "from ..machine import io", "errata imports machine"),
        ("fa2_lab.paper", "from . import tiles", "paper imports tiles"),
        ("fa2_lab.trace", "from fa2_lab.tiles import Tiling", "trace imports tiles"),
        ("fa2_lab.machine.io", "import fa2_lab", "machine imports __init__"),
        ("fa2_lab.reference.fa1", "from fa2_lab.studio import tour", "reference imports __main__"),
        ("fa2_lab.attic.old", "import numpy", "attic: this room has no floor; give it one in tests/test_house.py"),
    ],
)
def test_wrong_arrows_are_seen(module, source, arrow):
    assert wrong_arrows(source, module) == [arrow]


def test_right_arrows_are_let_through():
    assert (
        wrong_arrows(
            "from fa2_lab.tiles import Mask\nfrom .dropout import Dropout\nimport numpy", "fa2_lab.reference.fa2"
        )
        == []
    )
    assert wrong_arrows("from fa2_lab.studio.tour import tour", "fa2_lab.__main__") == []


# Tags ---------------------------------------------------------------------------------------------------------


def tags_in(folder: Path) -> set[str]:
    """Tags that the lines of a folder's files carry."""
    sources = [path.read_text(encoding="utf-8") for path in folder.rglob("*.py")]
    return {tag for source in sources for tags, _, _ in tagged_lines(source) for tag in tags}


def computing(paper: str) -> set[str]:
    """Tags of the computing lines of a paper."""
    return {tag for tag, (algorithm, line) in LINES.items() if line.computes and algorithm.tag.startswith(paper)}


def in_order(tags: set[str]) -> list[str]:
    return sorted(tags, key=list(LINES).index)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_computing_line_has_its_numpy_line(algorithm):
    assert in_order(computing(algorithm) - tags_in(PACKAGE / "reference")) == []


@pytest.mark.skipif(not (PACKAGE / "kernels" / "backward.py").is_file(), reason="no kernels in this version")
def test_every_computing_line_of_fa2_has_its_triton_line():
    assert in_order(computing("FA2") - tags_in(PACKAGE / "kernels")) == []


@pytest.mark.skipif(not (PACKAGE / "kernels" / "ladder.py").is_file(), reason="no ladder in this version")
def test_every_computing_line_of_fa1_s_forward_has_its_rung():
    dropout = {"FA1.A2.L1", "FA1.A2.L14"}  # the ladder leaves it out
    assert in_order(computing("FA1.A2") - dropout - tags_in(PACKAGE / "kernels")) == []


def files_that_may_tag() -> list[Path]:
    notebooks = PROJECT / "notebooks" / "text"
    return [*PACKAGE.rglob("*.py"), *notebooks.rglob("*.py"), PROJECT / "README.md"]


def test_no_tag_names_a_line_that_does_not_exist():
    named = {tag: path for path in files_that_may_tag() for tag in TAG.findall(path.read_text(encoding="utf-8"))}
    assert {tag: path.name for tag, path in named.items() if tag not in LINES} == {}


def test_loop_ends_carry_no_tag():
    ends = {tag for tag, (_, line) in LINES.items() if not line.computes}
    assert in_order(ends & (tags_in(PACKAGE / "reference") | tags_in(PACKAGE / "kernels"))) == []


# Importing ----------------------------------------------------------------------------------------------------

REFUSING = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {refused}:
            raise ImportError(f"{{name}} is refused here")
sys.meta_path.insert(0, Refuse())
"""


def python(source: str, refused: set[str]) -> str:
    """Run a source in a fresh interpreter that cannot import some modules; its output."""
    code = REFUSING.format(refused=refused) + source
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    return done.stdout


ALL_BUT_NUMPY = {"torch", "triton", "matplotlib", "tqdm", "yaml", "scipy", "IPython"}


def test_the_package_needs_numpy_alone_and_is_quick():
    timed = "import time; t = time.process_time(); import fa2_lab; print(time.process_time() - t)"
    assert min(float(python(timed, ALL_BUT_NUMPY)) for _ in range(3)) < 0.3


def test_floors_1_to_3_need_numpy_alone():
    rooms = [name for name in package_modules() if FLOORS.get(room_of(name), 99) <= 3]
    assert len(rooms) > 15
    python("\n".join(f"import {name}" for name in rooms), ALL_BUT_NUMPY)


def test_the_tour_goes_without_torch_and_triton():
    source = (
        "from fa2_lab.studio.tour import STAGES, run\nfor stage in STAGES[-3:]: print(run(stage).note, run(stage).ok)"
    )
    out = python(source, {"torch", "triton", "matplotlib"})
    assert out.splitlines() == [" True"] + ["skipped: torch is not installed True"] * 2


def test_the_refusing_interpreter_refuses():
    with pytest.raises(AssertionError, match="torch is refused here"):
        python("import torch", {"torch"})


# Packaging ----------------------------------------------------------------------------------------------------


def pyproject() -> dict:
    try:
        import tomllib
    except ImportError:  # Python 3.10, where pytest brings tomli
        import tomli as tomllib
    return tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements() -> list[Requirement]:
    project = pyproject()["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    return [Requirement(line) for line in project["dependencies"] + extras]


def test_the_package_sets_lower_bounds_only():
    operators = {r.name: {spec.operator for spec in r.specifier} for r in requirements()}
    assert operators and all(used == {">="} for used in operators.values()), operators
    triton = next(r for r in requirements() if r.name == "triton")
    assert triton.marker.evaluate({"platform_system": "Linux"}) and not triton.marker.evaluate(
        {"platform_system": "Darwin"}
    )


def test_constraints_set_upper_bounds_that_fit():
    lines = (PROJECT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    bounds = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all({spec.operator for spec in bound.specifier} == {"<"} for bound in bounds)
    lower = {r.name: next(iter(r.specifier)).version for r in requirements()}
    assert {"torch", "triton", "pytest"} <= {bound.name for bound in bounds} <= set(lower)
    assert all(bound.specifier.contains(lower[bound.name]) for bound in bounds)


def conda_environment() -> dict:
    return yaml.safe_load((PROJECT / "environment.yml").read_text(encoding="utf-8"))


def test_environment_yml_line_by_line():
    matchspec = pytest.importorskip("rattler").MatchSpec
    environment = conda_environment()
    assert set(environment) == {"name", "channels", "dependencies"}
    assert re.fullmatch(r"[a-z][a-z0-9-]*", environment["name"]) and environment["channels"] == ["conda-forge"]
    *specs, pip = environment["dependencies"]
    for spec in specs:
        assert isinstance(spec, str) and matchspec(spec, strict=True).name is not None
    assert [matchspec(spec, strict=True).name.normalized for spec in specs] == ["python", "pip"]
    assert list(pip) == ["pip"] and pip["pip"] == ["-e .[dev]"]
    extra = Requirement("fa2-lab" + pip["pip"][0].removeprefix("-e ."))
    assert extra.extras <= set(pyproject()["project"]["optional-dependencies"])
    with pytest.raises(Exception, match=r"."):
        matchspec("python >= = 3", strict=True)


def test_conda_and_pip_agree_on_python():
    python_spec = conda_environment()["dependencies"][0]
    assert python_spec.startswith("python" + pyproject()["project"]["requires-python"])


def readme_commands() -> list[str]:
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    return re.search(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1].splitlines()


def test_readme_has_the_two_commands_and_names_only_commands_that_exist():
    assert readme_commands() == [
        "pip install -c constraints.txt -e '.[dev]' && python -m fa2_lab",
        "python -m pytest",
    ]
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    shown = subprocess.run(
        [sys.executable, "-m", "fa2_lab", "--help"], capture_output=True, text=True, timeout=60
    ).stdout
    for name in set(re.findall(r"fa2-lab ([a-z]+)", text)):
        assert re.search(rf"^ +{name} ", shown, re.MULTILINE), f"the README speaks of fa2-lab {name}"


def test_readme_layout_is_the_house():
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| (`.*?`) \|", text, re.MULTILINE)
    rooms = {name.strip("`"): int(floor) for floor, names in rows for name in names.split(", ")}
    assert len(rooms) >= 6
    for name, floor in rooms.items():
        assert (PACKAGE / name).exists(), f"the README speaks of {name}"
        assert FLOORS[room_of(f"fa2_lab.{name.removesuffix('.py').rstrip('/')}")] == floor, name


FAKE_PYTHON = """#!/usr/bin/env bash
mkdir -p "$3/bin"
echo "PATH=\\"$3/bin:$PATH\\"" > "$3/bin/activate"
for tool in pip python; do
    printf '#!/usr/bin/env bash\\necho "%s $*" >> "%s"\\nexit ${{FAIL_%s:-0}}\\n' $tool "{log}" $tool > "$3/bin/$tool"
    chmod +x "$3/bin/$tool"
done
"""


@pytest.mark.skipif(os.name == "nt", reason="a bash script")
@pytest.mark.parametrize("failing, expected", [({}, 3), ({"FAIL_pip": "1"}, 1)], ids=["all well", "pip fails"])
def test_ci_runs_the_readme_commands_in_a_venv_from_anywhere(tmp_path, failing, expected):
    log, fake = tmp_path / "log", tmp_path / "python3"
    fake.write_text(FAKE_PYTHON.format(log=log))
    fake.chmod(0o755)
    env = {**os.environ, "PYTHON": str(fake), "TMPDIR": str(tmp_path), **failing}
    done = subprocess.run(
        [str(PROJECT / ".ci" / "run")], cwd=tmp_path, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    ran = ["pip install -c constraints.txt -e .[dev]", "python -m fa2_lab", "python -m pytest"]
    assert log.read_text().splitlines() == ran[:expected], done.stderr
    assert (done.returncode == 0) == (not failing)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "python3"], "something was left behind"


def test_the_workflow_calls_ci_run_on_both_pythons():
    workflow = yaml.safe_load((PROJECT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["readme"]
    assert job["strategy"]["matrix"]["python"] == ["3.10", "3.12"]
    assert any(".ci/run" in step.get("run", "") for step in job["steps"])
    assert (PROJECT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[3] == "set -euo pipefail"


# Words and style ----------------------------------------------------------------------------------------------

# Paths of somebody's machine, file names of sources, talk of how it was made; written so as not to match itself.
PRIVATE = re.compile(
    r"[/](?:work|farm|root|home|opt)[/]|\.\.[/]shared\b|\b\d{3}_[0-9a-f]{16}\b|\bsub[-]?agents?\b", re.IGNORECASE
)
TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".json", ".sh", ".cfg", ".ipynb", ".svg", ""}


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := PROJECT / name).is_file()]


def test_no_file_speaks_of_the_machines_it_was_made_on():
    found = {}
    for path in tracked_files():
        if path.suffix in TEXT and (match := PRIVATE.search(path.read_text(encoding="utf-8"))):
            found[str(path.relative_to(PROJECT))] = match[0]
    assert found == {}
    assert all(PRIVATE.search(text) for text in ("/" + "work/main", "sub" + "agent", "000" + "_24c5bba537080438"))


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")
@pytest.mark.parametrize("rule", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_ruff_is_content(rule):
    env = {**os.environ, "RUFF_OUTPUT_FORMAT": "concise"}
    command = [sys.executable, "-m", "ruff", *rule, "."]
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
