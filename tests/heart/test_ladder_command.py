"""`fa2-lab ladder` and its picture: what they print and draw is the record's, for every rung."""

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
from fa2_lab import records
from fa2_lab.kernels import ladder
from fa2_lab.records import Measurement, Record
from fa2_lab.tools import command
from fa2_lab.tools import ladder as room
from fa2_studio.bench.problem import Problem
from fa2_studio.bench.results import save

MACHINE = dict(gpu="NVIDIA H200", driver="1", python="3", torch="2.11", triton="3.6", cudnn="9", peers={}, commit="abc")


def took(rung: str, causal: bool) -> float:
    """Milliseconds that the fake record gives a rung: no two alike, and rung 02 slower than 01."""
    number = {"01": 2, "02": 1}.get(rung[1:3], int(rung[1:3]))
    return 40.0 / (number + 1) + 0.5 * causal


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A record of all rungs but the last."""
    made = Record("ladder", MACHINE, "by hand")
    for causal in (False, True):
        problem = Problem.square(4096, 128, causal)
        values = {rung: [took(rung, causal)] * 3 for rung in ladder.RUNGS[:-1]} | {"cuDNN": [2.0] * 3}
        made.rows.append(Measurement(problem.as_dict(), "forward", values, flops=problem.flops("forward")))
    for n, rung in enumerate(ladder.RUNGS[:-1]):
        of = Problem.square(4096, 128, False).as_dict() | dict(rung=rung)
        made.rows.append(
            Measurement(of, "compiled", {"registers": [64.0 + 8 * n], "programs on an SM": [2.0]}, unit="count")
        )
        made.rows.append(
            Measurement(of, "counters", {"tensor cores at work, %": [n * n / 5], "L2 bytes": [5e9]}, unit="count")
        )
    other = Problem.square(4096, 64, False).as_dict() | dict(rung="r09_free_loads")  # a picture's, not the table's
    made.rows.append(
        Measurement(other, "counters", {"tensor cores at work, %": [99.0], "L2 bytes": [5e9]}, unit="count")
    )
    save(made, tmp_path)
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    return made


def test_the_table_has_every_rung_with_its_change_and_its_numbers(recorded, capsys):
    assert command.main(["ladder"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for n, rung in enumerate(ladder.RUNGS[:-1]):
        (line,) = [line for line in lines if line.startswith(rung[1:3] + " ")]
        name, sentence = ladder.change(rung)
        speeds = [recorded.rows[causal].rate(rung) for causal in (0, 1)]
        share = 2.0 / took(rung, False)
        assert line.split(None, 1)[1].startswith(name) and line.endswith(sentence)
        numbers = line.removesuffix(sentence)[22:].split()
        assert numbers == [f"{x:.0f}" for x in speeds] + [f"{share:.0%}", f"{64 + 8 * n}", "2", f"{n * n / 5:.0f}%"]
    (last,) = [line for line in lines if line.startswith(ladder.RUNGS[-1][1:3] + " ")]
    assert last.removesuffix(ladder.change(ladder.RUNGS[-1])[1])[22:].split() == ["-"] * 6


def test_the_table_on_a_page_has_the_same_cells(recorded):
    lines = room.markdown(recorded)
    first, last = (f"{2 / took(ladder.RUNGS[n], False):.0%}" for n in (0, -2))
    assert f"From {first} to {last} of cuDNN in {len(ladder.RUNGS) - 2} changes: every rung" in lines[0]
    written = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert written[2:] == [[name, *numbers, sentence] for name, numbers, sentence in room.cells(recorded)]
    assert len(written[2:]) == len(ladder.RUNGS) + 1 and written[-1] == ["cuDNN", *written[-1][1:-1], ""]


def test_two_rungs_give_the_sentence_the_diff_and_the_recorded_step(recorded, capsys):
    assert command.main(["ladder", "09", "10"]) == 0
    printed = capsys.readouterr().out
    before, after = ladder.find("09"), ladder.find("10")
    assert printed.startswith(f"Rung 10, {': '.join(ladder.change(after))}\n")
    assert f"{before} → {after}" in printed and re.search(r"^\+.*num_stages=", printed, re.MULTILINE)
    ratio = took(before, False) / took(after, False)
    assert re.search(rf"N 4,096, batch 4, 16 heads, d 128, no mask .* × {ratio:.2f}$", printed, re.MULTILINE)
    assert "tensor cores at work, %" in printed and "L2 bytes" not in printed, "what did not move is not told"
    assert command.main(["ladder", "10"]) == 0 and capsys.readouterr().out == printed
    assert command.main(["ladder", "s00", "s01"]) == 0
    assert capsys.readouterr().out.endswith("\nnot recorded yet: `fa2-lab bench ladder` measures it on a GPU\n")


@pytest.mark.parametrize("asked, says", [(["99"], "rung: got '99'"), (["07", "08", "09"], "rungs: got 3")])
def test_bad_input_is_one_sentence(recorded, asked, says, capsys):
    assert command.main(["ladder", *asked]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_without_a_record_it_says_how_to_get_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    assert command.main(["ladder"]) == 2
    assert "fa2_lab bench ladder" in capsys.readouterr().err
