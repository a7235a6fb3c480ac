"""Write the files that an instructor distributes: bundles for students, and packages that grade on Gradescope."""

import json
import os
import shutil
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import nbformat

from fa2_lab.tools import files
from fa2_studio.course import grade, results, sandbox, sandbox_package, seeds
from fa2_studio.course.grade_notebook import Graded
from fa2_studio.course.notebooks import FOLDER, PROJECT, Assignment, find_assignment, source_notebook, student_version

PAGES = {"STUDENT.md": "README.md", "AGENTS.md": "AGENTS.md"}  # {page next to the notebooks: name in a bundle}


def write_bundle(
    folder: Path,
    assignments: list[Assignment],
    people: tuple[results.Person, ...] = (),
    secret: str = "",
    wheel: Path | None = None,
) -> list[Path]:
    """Write notebooks, their visible checks, two pages and, if given, the package's wheel, and return the folders.

    If `people` is given, each student gets a folder with an individual seed. Otherwise, there is one folder for all.
    """
    if wheel and not (wheel.is_file() and wheel.match("fa2_lab-*.whl")):
        raise ValueError(f"--wheel: got {wheel}; it takes the file fa2_lab-….whl that `pip wheel` made")
    files.check_writable(folder, "course bundle")
    homes = {folder / person.folder: person.id or person.folder for person in people} or {folder: ""}
    for home, student in homes.items():
        (home / "checks").mkdir(parents=True, exist_ok=True)
        if wheel:
            shutil.copy(wheel, home)
        for path in [sandbox_package.CHECKS / "__init__.py", *sandbox_package.visible_checks(assignments)]:
            files.write(home / "checks" / path.name, path.read_bytes())
        for assignment in assignments:
            notebook = student_version(seeds.with_seed(source_notebook(assignment), seeds.seed_of(student, secret)))
            files.write(home / f"{assignment.name}.ipynb", nbformat.writes(notebook) + "\n")
        for page, name in PAGES.items():
            files.write(home / name, (FOLDER / page).read_bytes())
    return list(homes)


# Gradescope ---------------------------------------------------------------------------------------------------------

SETUP = """#!/usr/bin/env bash
# Runs once, as root, when the platform builds the image.
set -e
apt-get update && apt-get install -y python3 python3-pip python3-venv
python3 -m venv /autograder/env
# torch comes without CUDA: the platform's container has no GPU
/autograder/env/bin/pip install -c /autograder/source/constraints.txt {needs} \\
    --extra-index-url https://download.pytorch.org/whl/cpu
chmod -R go-rwx /autograder/source
"""
RUN = """#!/usr/bin/env bash
# Runs for each submission, as root; the student's code runs as a user that owns nothing.
mkdir -p /autograder/results && chmod 700 /autograder/source /autograder/results
cd /autograder/source && PYTHONPATH=. /autograder/env/bin/python -m fa2_studio.course.handout {name}
"""


def write_gradescope(folder: Path, assignments: list[Assignment]) -> list[Path]:
    """Write an autograder package for each assignment, and return the files.

    A package is a file NAME.zip that contains setup.sh, run_autograder and all the code needed for grading.
    """
    files.check_writable(folder, "course gradescope")
    tops = (PROJECT / "fa2_lab", PROJECT / "fa2_studio", FOLDER / "checks", FOLDER / "programs")
    code = [path for top in tops for path in sorted(top.rglob("*")) if path.suffix in (".py", ".md")]  # .md: its data
    archives = []
    for assignment in assignments:
        wanted_files = [*code, PROJECT / "constraints.txt", FOLDER / f"{assignment.name}.ipynb"]
        wanted_files += [FOLDER / "text" / f"{assignment.name}.py"]
        archives.append(folder / f"{assignment.name}.zip")
        with zipfile.ZipFile(archives[-1], "w", zipfile.ZIP_DEFLATED) as archive:
            for path in wanted_files:
                archive.write(path, path.relative_to(PROJECT))
            needs = " ".join(dict.fromkeys(("numpy", "nbformat", "tqdm", *assignment.needs)))
            for name, text in (("setup.sh", SETUP), ("run_autograder", RUN)):
                entry = zipfile.ZipInfo(name)
                entry.external_attr = 0o755 << 16
                archive.writestr(entry, text.format(needs=needs, name=assignment.name))
    return archives


def grade_on_gradescope(name: str, home: Path) -> dict:
    """Grade the submission in home/submission, and write home/results/results.json."""
    assignment = find_assignment(name)
    settings = grade.GradingSettings(trust=True)
    (one,) = grade.submissions_of_student("", [home / "submission"], [assignment])
    submitted_notebooks = [p for p in grade.files_below(home / "submission") if p.suffix == ".ipynb"]
    if one.path is None and len(submitted_notebooks) == 1:  # the upload itself identifies the assignment
        one.path, one.remarks = submitted_notebooks[0], [f"{submitted_notebooks[0].name} was graded"]
    with grade.staged_packages([assignment]) as staged:
        graded = grade.grade_one(
            one, seed=0, staged=staged, settings=settings, core=0, kind=sandbox.sandbox_kind() or "user"
        )
    if graded.is_unfinished:  # without a result, the platform notifies the instructor
        raise SystemExit("; ".join(graded.sentences))
    graded.sentences = one.remarks + graded.sentences
    result = results_json(graded)
    (home / "results").mkdir(exist_ok=True)
    files.write(home / "results" / "results.json", json.dumps(result))
    return result


def results_json(graded: Graded) -> dict:
    """Return the results for Gradescope: one test per step, with a line per check and a hint for each failed check."""
    texts = {name: [] for name in graded.most}
    for kind, name, _, output in graded.page:
        if name in texts:
            texts[name] += [results.KINDS[kind] + ":", output]
    tests = [
        {
            "name": name.removeprefix("test_"),
            "score": graded.got.get(name, 0.0),
            "max_score": most,
            "output": "\n".join(texts[name]),
        }
        for name, most in graded.most.items()
    ]
    remarks = (
        "\n".join(graded.sentences) or "Each step is checked on its own. Each check that failed has a hint below it."
    )
    return {"score": graded.score, "output": remarks, "output_format": "text", "tests": tests, "visibility": "visible"}


if __name__ == "__main__":
    with suppress(AttributeError):
        os.umask(0o077)
    grade_on_gradescope(sys.argv[1], Path("/autograder"))
