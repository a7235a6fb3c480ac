"""`fa2-lab ladder`: what it prints is the record's, the compiled numbers' and the model's, for every rung."""

import json
import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
from fa2_lab import records
from fa2_lab.kernels import ladder
from fa2_lab.machine import reasons
from fa2_lab.records import Measurement, Record
from fa2_lab.tools import command
from fa2_lab.tools import ladder as page
from fa2_studio.bench.problem import Problem
from fa2_studio.bench.results import save

MACHINE = dict(gpu="NVIDIA H200", driver="1", python="3", torch="2.11", triton="3.6", cudnn="9", peers={}, commit="abc")
LAST = ladder.RUNGS[-1]


def took(rung: str, causal: bool) -> float:
    """Milliseconds that the fake record gives a rung: no two alike, and rung 02 slower than 01."""
    number = {"01": 2, "02": 1}.get(rung[1:3], int(rung[1:3]))
    return 40.0 / (number + 1) + 0.5 * causal


def busy(n: int) -> float:
    """Percent of the time in which the fake record's tensor cores work."""
    return (n + 1) ** 2 / 6


def compiled(rung: str, causal: bool) -> dict:
    n = int(rung[1:3])
    numbers = dict(registers=64 + 8 * n + causal, programs=2 - causal, spills=0, shared=1024, waits=1)
    return dict(rung=rung, d=128, causal=causal, instructions=600 - n, exponentials=34, keys=64, consumers=1) | numbers


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
        counts = {"tensor cores at work, %": [busy(n)], "L2 bytes": [5e9], "SM cycles": [1e6]}
        made.rows.append(Measurement(of, "counters", counts, unit="count"))
    save(made, tmp_path)
    rows = [compiled(rung, causal) for rung in ladder.RUNGS[:-1] for causal in (False, True)]
    (tmp_path / "rungs.json").write_text(json.dumps(dict(rungs=rows)))
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    reasons.facts.cache_clear()
    yield made
    reasons.facts.cache_clear()


def row_of(text: str, rung: str) -> list[str]:
    """A rung's cells in the printed table."""
    (line,) = [line for line in text.splitlines() if line.startswith(page.label(rung) + " ")]
    return line[22:].replace("≤ ", "≤").split(maxsplit=len(page.COLUMNS))


def test_the_table_has_every_rung_with_prediction_beside_measurement(recorded, capsys):
    assert command.main(["ladder"]) == 0
    printed = capsys.readouterr().out
    for n, rung in enumerate(ladder.RUNGS[:-1]):
        cells = row_of(printed, rung)
        assert cells[:2] == [f"{recorded.rows[causal].rate(rung):.0f}" for causal in (0, 1)]
        assert cells[2] == f"{2.0 / took(rung, False):.0%}" and cells[7:9] == ["2/1", f"{64 + 8 * n}/{65 + 8 * n}"]
        assert float(cells[9]) == pytest.approx(1 / took(rung, False), abs=0.0051)
        if n:
            old = ladder.RUNGS[n - 1]
            assert cells[5:7] == [f"{took(old, c) / took(rung, c):.2f}" for c in (False, True)]
            reason = reasons.reason(rung)
            assert cells[10] == f"{reason.limit} → {reason.removes}"
            at_most = f"≤{100 / busy(n - 1):.2f}"
            assert (cells[3] == at_most and cells[4] == "-") if not reason.modelled else float(cells[3]) > 0
    assert row_of(printed, LAST)[:3] == ["-", "-", "-"] and f"Measured before rung {LAST[1:3]} stood here" in printed
    recorded.rows[0].failed[LAST] = "out of memory"
    assert "Measured before" not in page.setting(recorded)


def test_a_prediction_that_misses_has_its_sentence_and_no_other_has(recorded, capsys):
    assert command.main(["ladder"]) == 0
    below = capsys.readouterr().out.split("Predictions that miss by more than a tenth:\n")[1]
    missed = [
        rung
        for old, rung in zip(ladder.RUNGS[:-2], ladder.RUNGS[1:-1], strict=True)
        if any(reasons.step(recorded, old, rung, causal).misses for causal in (False, True))
    ]
    assert re.findall(r"^(\d\d) ", below, re.MULTILINE) == [rung[1:3] for rung in missed] != []


def test_one_change_has_cause_prediction_difference_counters_and_what_comes_next(recorded, capsys):
    assert command.main(["ladder", "09", "10"]) == 0
    printed = capsys.readouterr().out
    before, after = ladder.find("09"), ladder.find("10")
    reason = reasons.reason(after)
    assert printed.startswith(f"Rung 10, {': '.join(ladder.change(after))}\n")
    assert reason.limit in printed and reason.removes in printed and reason.why.split()[-1] in printed
    assert f"{before} → {after}" in printed and re.search(r"^\+.*num_stages=", printed, re.MULTILINE)
    ratio = took(before, False) / took(after, False)
    assert re.search(rf"^measured × +{ratio:.2f} ", printed, re.MULTILINE)
    assert f"{reasons.predicted(before, after, causal=False, d=128):.2f}" in printed
    assert re.search(rf"N 4,096, batch 4, 16 heads, d 128, no mask .* × {ratio:.2f}$", printed, re.MULTILINE)
    moved = [("tensor cores at work, %", 16.7, 20.2), ("registers, no mask, d 128", 136, 144)]
    assert all(re.search(rf"^{what} +{was} +{now}$", printed, re.MULTILINE) for what, was, now in moved)
    assert "L2 bytes" not in printed, "what did not move is not shown"
    assert printed.rstrip().splitlines()[-1].startswith(f"Next: {page.label(ladder.find('11'))}. ")
    assert command.main(["ladder", "10"]) == 0 and capsys.readouterr().out == printed
    assert command.main(["ladder", "x23"]) == 0 and "r23_wide → x23_software_exp2" in capsys.readouterr().out
    assert command.main(["ladder", "00"]) == 0
    printed = capsys.readouterr().out
    assert f"→ {ladder.RUNGS[0]}" not in printed and "Next: 01 " in printed
    assert [page.short(x) for x in (0.0123, 999, 12345, 2.5e6, 4.27e9)] == ["0.0123", "999", "12.3k", "2.5M", "4.27G"]
    assert command.main(["ladder", "s00", "s01"]) == 0
    assert capsys.readouterr().out.endswith("\nnot recorded yet: `fa2-lab bench ladder` measures it on a GPU\n")


def test_without_a_record_it_says_how_to_get_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    assert command.main(["ladder"]) == 2
    assert "fa2_lab bench ladder" in capsys.readouterr().err
    save(Record("ladder", MACHINE, "by hand", missing=["all"]), tmp_path)  # of a run that ended at once
    assert command.main(["ladder"]) == 2 and "no row of the table's shape yet" in capsys.readouterr().err
    assert records.compared_with(("r00_standard", "fa2_lab")) == "fa2_lab"  # where no peer can run
