"""The course around the assignments in notebooks/assignments: its material for students, and its grader.

notebooks       the assignments' notebooks, the students' versions of them, and the submissions
texts           builds the notebooks from their texts
seeds           gives each student different numbers and sizes
keys            the planted bugs, which students do not get
sandbox         the sandbox around a student's process
worker          the process in the sandbox
channel         messages to and from this process
seccomp         the filter for the system calls that it may not make
grade_notebook  grades one notebook by running its tests, and the student's code in the sandbox
grade           grades a folder of submissions, with one process per submission
results         writes records, tables and pages
similar         finds submissions that share lines
package         chooses the modules that a student's process may import
handout         writes bundles for students, and packages for Gradescope
command         the command line
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "notebooks" / "assignments"))  # for `import checks`
