"""`fa2-lab ladder`: what it prints is the record's, the compiled numbers' and the model's, for every rung."""

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
from fa2_lab import records
from fa2_lab.kernels import ladder
from fa2_lab.machine import reasons
from fa2_lab.records import Record, load
from fa2_lab.tools import command
from fa2_lab.tools import ladder as page
from fa2_studio.bench.recording import save_record


def cells_of(text: str, rung: str) -> list[str]:
    """Return a rung's cells in the printed table."""
    (line,) = [line for line in text.splitlines() if line.startswith(page.label(rung) + " ")]
    return line[22:].replace("≤ ", "≤").split(maxsplit=len(page.COLUMNS))


def test_ladder_table_lists_every_rung_with_prediction_and_measurement(capsys):
    assert command.main(["ladder"]) == 0
    printed, record = capsys.readouterr().out, load("ladder")
    rows = [reasons.forward_row(record, mask, 128) for mask in (False, True)]
    missed = []
    for n, rung in enumerate(ladder.RUNGS):
        cells = cells_of(printed, rung)
        assert cells[:2] == [f"{row.rate(rung):.0f}" for row in rows]
        assert cells[2] == f"{rows[0].ratio(rung, 'FlashAttention-3'):.0%}"
        facts = [reasons.compiled_rungs().get((rung, mask, 128)) for mask in (False, True)]
        assert cells[7] == "/".join(str(fact["programs"]) for fact in facts)
        if n:
            old, reason = ladder.RUNGS[n - 1], reasons.reason(rung)
            assert cells[5:7] == [f"{row.ratio(rung, old):.2f}" for row in rows]
            assert cells[10] == f"{reason.limit} → {reason.removes}"
            busy = reasons.hardware_counters(record, old)["tensor cores at work, %"]
            predicted = reasons.predicted_speedup(old, rung, causal=False, d=128)
            assert cells[3] == (f"{predicted:.2f}" if reason.modelled else f"≤{100 / busy:.2f}")
            steps = [reasons.rung_gain(record, old, rung, mask) for mask in (False, True)]
            missed += [rung[1:3]] if any(step.misses for step in steps) else []
    below = printed.split("Predictions that miss by more than a tenth:\n")[1]
    assert re.findall(r"^(\d\d) ", below, re.MULTILINE) == missed != []


def test_ladder_command_explains_one_change(capsys):
    assert command.main(["ladder", "09", "10"]) == 0
    printed, record = capsys.readouterr().out, load("ladder")
    before, after = ladder.find("09"), ladder.find("10")
    reason, ratio = reasons.reason(after), reasons.forward_row(record, causal=False, d=128).ratio(after, before)
    assert reason.limit in printed and reason.removes in printed
    assert f"{before} → {after}" in printed and re.search(r"^\+.*num_stages=", printed, re.MULTILINE)
    assert re.search(rf"^measured × +{ratio:.2f} ", printed, re.MULTILINE)
    assert f"{reasons.predicted_speedup(before, after, causal=False, d=128):.2f}" in printed
    assert command.main(["ladder", "10"]) == 0 and capsys.readouterr().out == printed
    assert command.main(["ladder", "x23"]) == 0 and "r23_wide → x23_software_exp2" in capsys.readouterr().out
    assert command.main(["ladder", "00"]) == 0 and f"→ {ladder.RUNGS[0]}" not in capsys.readouterr().out


def test_ladder_without_a_record_says_how_to_make_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    assert command.main(["ladder"]) == 2
    assert "fa2_lab bench ladder" in capsys.readouterr().err
    save_record(Record("ladder", load("ladder", records.IN_A_CHECKOUT).machine, "by hand", missing=["all"]), tmp_path)
    assert command.main(["ladder"]) == 2 and "no row of the table's shape yet" in capsys.readouterr().err
    assert records.ladder_baseline(("r00_standard", "fa2_lab")) == "fa2_lab"  # where no peer can run
