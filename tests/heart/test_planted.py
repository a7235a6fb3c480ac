"""The planted faults keep their places; `python -m planted` plants them."""

import re

import pytest
from planted import ROOT, rooms

FAULTS = [(room, fault) for room, faults in rooms().items() for fault in faults]


def test_no_fault_is_planted_twice():
    assert len({fault for _, fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("room", rooms())
def test_every_fault_has_its_place_and_its_test(room):
    for fault in rooms()[room]:
        assert fault.planted() != (ROOT / fault.file).read_text(encoding="utf-8"), fault
        file, name = fault.test.split("::")
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name.split('[')[0]}\(", source, re.MULTILINE), f"{fault.test} is not there"
