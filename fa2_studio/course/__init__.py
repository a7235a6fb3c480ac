"""The course around the assignments in notebooks/assignments: what students get, and how their work is graded.

notebooks       the assignments' notebooks, students' versions of them, and submissions; texts: builds them from texts
seeds, keys     each student's own numbers and sizes; the planted bugs, which students do not get
sandbox         the sandbox of a student's process; worker: the process in it; channel: messages to and from it;
                seccomp: system calls that it may not make
grade_notebook  grades one notebook: runs its tests, and the student's code in the sandbox
grade           grades a folder of submissions, each in its own process; results: records, tables, pages
similar         finds submissions that share lines
package         the modules that a student's process may import; handout: bundles for students, packages for Gradescope
command         the command line
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "notebooks" / "assignments"))  # for `import checks`
