"""The course around the assignments in notebooks/assignments: what students get, and how their work is graded.

notebooks   the assignments and what is handed in: reading, what students get of them; texts: built from their texts
seeds, keys     numbers, sizes and planted slips of each student's own; what students do not get
box         the box around a student's process; worker: what runs in it; channel: plain messages between the two
judge       one notebook: its tests here, the student's code in the box
grade       a folder of submissions, each judged in a process that may be lost; results: records, tables, pages
similar     which submissions share lines
package     parts of this package as a folder; handout: bundles for students, packages for Gradescope
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "notebooks" / "assignments"))  # where the checks are
