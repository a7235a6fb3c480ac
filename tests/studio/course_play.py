"""Runs the cells of assignments without a notebook kernel; as a script it plays every version of one of them.

Triton's interpreter has to be chosen before Triton is imported, so assignments in Triton are played in a process apart.
"""

import ast
import contextlib
import io
import json
import linecache
import os
import sys

if __name__ == "__main__":
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
from fa2_lab.kernels import triton_versions


def played(notebook: dict) -> tuple[dict[str, float], str]:
    """{step: points} of a notebook's test cells, and all that was printed."""
    space, points, printed = {"__name__": "notebook"}, {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                marks = cell["metadata"].get("nbgrader", {})
                run_cell(cell["source"], marks.get("grade_id", "own"), marks.get("grade"), space, points)
    return points, printed.getvalue()


def run_cell(source: str, name: str, graded: bool, space: dict, points: dict) -> None:
    """One cell; the last line of a test cell is its points."""
    file = f"<cell {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for inspect.getsource
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if graded else None
    exec(compile(tree, file, "exec"), space)
    if graded:
        points[name] = eval(compile(last, file, "eval"), space)


if __name__ == "__main__":
    from test_course import versions

    triton_versions.quicken()
    print(json.dumps({key: played(notebook) for key, notebook in versions(sys.argv[1]).items()}))
