"""What lies in figures/ is what the code draws, element by element; where they differ, a test says in which and how.

Whoever changes a picture draws its file anew, looks at it, and commits both. Another version of matplotlib than the
file's lays a picture out a few pixels differently: then places may differ by that much, all else may not.
"""

import re
from difflib import SequenceMatcher
from xml.etree import ElementTree

import pictures
import pytest

from fa2_lab.plots import poster, style
from fa2_lab.tools import files
from fa2_lab.tools.figures import DRAWN_BY, PICTURES, SHEETS

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
PLACES = ("x", "y", "width", "height", "d", "transform", "viewBox")
NAMED = ("id", "clip-path", "{http://www.w3.org/1999/xlink}href")  # names that matplotlib invents
SAME, OTHER = 0.05, 8  # pixels


def elements(svg: bytes) -> list[tuple[str, str, dict, dict]]:
    """(kind, its words, its looks, its places) of everything in a drawing."""
    found = []
    for e in ElementTree.fromstring(svg).iter():
        attributes = {
            name: re.sub(r"url\(#\w+\)", "url", value) for name, value in e.attrib.items() if name not in NAMED
        }
        places = {name: attributes.pop(name) for name in PLACES if name in attributes}
        found.append((e.tag.rpartition("}")[2], " ".join((e.text or "").split()), attributes, places))
    return found


def differences(kept: bytes, drawn: bytes, pixels: float) -> list[str]:
    """In words: what two drawings do not have in common."""
    old, new = elements(kept), elements(drawn)
    told = []
    if len(old) != len(new):
        kinds = [[e[:2] for e in side] for side in (old, new)]
        for how, a, b, c, d in SequenceMatcher(None, *kinds, autojunk=False).get_opcodes():
            if how != "equal":
                gone, came = ([" ".join(e[:2]) for e in side] for side in (old[a:b], new[c:d]))
                told.append(f"in the file {gone}, drawn {came}")
        return told
    for (kind, words, looks, places), (kind_, words_, looks_, places_) in zip(old, new, strict=True):
        name = f"{kind} {words!r}" if words else f"{kind} at {' '.join(places.values())[:60]}"
        if (kind, words) != (kind_, words_):
            told.append(f"{name}: drawn {kind_} {words_!r}")
        for what in looks.keys() | looks_.keys():
            if looks.get(what) != looks_.get(what):
                told.append(f"{name}: {what} is {looks.get(what)} in the file, {looks_.get(what)} drawn")
        for what in places.keys() | places_.keys():
            if not near(places.get(what, ""), places_.get(what, ""), pixels):
                told.append(f"{name}: {what} is {places.get(what)} in the file, {places_.get(what)} drawn")
    return told


def near(a: str, b: str, pixels: float) -> bool:
    """Whether two places say the same but for some pixels in their numbers."""
    x, y = NUMBER.findall(a), NUMBER.findall(b)
    return NUMBER.sub("", a) == NUMBER.sub("", b) and all(
        abs(float(p) - float(q)) <= pixels for p, q in zip(x, y, strict=True)
    )


def check(name: str, figure, alt: str) -> None:
    kept = (files.ROOT / "figures" / name).read_bytes()
    told = differences(kept, style.svg(figure, alt), SAME if DRAWN_BY.encode() in kept else OTHER)
    assert not told, f"{name}: {len(told)} differences to what the code draws:\n" + "\n".join(told[:12])


@pytest.mark.parametrize("picture", PICTURES, ids=lambda p: p.name)
def test_a_picture_in_its_file_is_what_the_code_draws(picture):
    check(picture.still, *picture.file.draw(**pictures.data_of(picture.name)))  # anew: to be saved changes a figure


@pytest.mark.parametrize("name", SHEETS)
def test_a_poster_in_its_file_is_what_the_code_draws(name):
    check(f"{name}.svg", *poster.draw(**poster.data(SHEETS[name])))


def test_a_difference_is_told_in_words():
    kept = b'<svg><text x="1.00" style="fill: #ff0000">K</text><path d="M 1 2 L 3 4"/></svg>'
    assert differences(kept, kept.replace(b"1.00", b"1.04"), SAME) == []
    assert differences(kept, kept.replace(b"1.00", b"1.10"), SAME) == ["text 'K': x is 1.00 in the file, 1.10 drawn"]
    assert differences(kept, kept.replace(b"1.00", b"8.90"), OTHER) == []
    assert differences(kept, kept.replace(b"ff0000", b"0000ff"), OTHER) == [
        "text 'K': style is fill: #ff0000 in the file, fill: #0000ff drawn"
    ]
    assert differences(kept, kept.replace(b">K<", b">V<"), OTHER) == ["text 'K': drawn text 'V'"]
    assert differences(kept, kept.replace(b"L 3", b"M 3"), OTHER) == [
        "path at M 1 2 L 3 4: d is M 1 2 L 3 4 in the file, M 1 2 M 3 4 drawn"
    ]
    alone = kept.replace(b'<path d="M 1 2 L 3 4"/>', b"")
    assert differences(kept, alone, OTHER) == ["in the file ['path '], drawn []"]
