"""Run all versions of an assignment in Triton, in a process that turns the interpreter on before it imports Triton."""

import io
import json
import os
import sys

if __name__ == "__main__":
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

import fa2_studio.course  # noqa: F401, I001 — finds the checks
from checks.__main__ import played


def outcome(notebook: dict) -> tuple[dict[str, float], str]:
    """Return {step: points} of a notebook's test cells, and everything that was printed."""
    printed = io.StringIO()
    points, _ = played(json.loads(json.dumps(notebook)), printed)
    return points, printed.getvalue()


if __name__ == "__main__":
    from test_course import versions

    import fa2_lab.kernels  # noqa: F401 — makes the interpreter three times as fast

    print(json.dumps({key: outcome(notebook) for key, notebook in versions(sys.argv[1]).items()}))
