"""The planted faults keep their places, and some are planted, others every day; `python -m planted` does all."""

import datetime
import re
import subprocess
import sys

import pytest
from planted import ROOT, rooms

FAULTS = [(room, fault) for room, faults in rooms().items() for fault in faults]
A_DAY = 5  # so many are planted in one run of the tests


def test_no_fault_is_planted_twice():
    assert len({fault for _, fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("room", rooms())
def test_every_fault_has_its_place_and_its_test(room):
    for fault in rooms()[room]:
        assert fault.planted() != (ROOT / fault.file).read_text(encoding="utf-8"), fault
        file, name = fault.test.split("::")
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name.split('[')[0]}\(", source, re.MULTILINE), f"{fault.test} is not there"


def test_today_s_faults_are_seen():
    parts = max(1, len(FAULTS) // A_DAY)
    part = datetime.date.today().toordinal() % parts + 1
    command = [sys.executable, "-m", "planted", "--part", f"{part}/{parts}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(command[1:])}\n{done.stdout}{done.stderr}"
