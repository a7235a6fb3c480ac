"""Other projects' tests run on us: a checkout of our own making in the place of theirs."""

import pytest
import torch

import fa2_lab
from fa2_studio.judges import command
from fa2_studio.judges.adapters import flash_attention_2 as two
from fa2_studio.judges.adapters import flash_attention_3 as three
from fa2_studio.judges.adapters import flash_attention_4 as four
from fa2_studio.judges.suites import SUITES

THEIRS = """
import pytest, torch
from .adapters import get_flashattention_autograd_function_pytorch as ours

def test_right():
    q = torch.randn(2, 5, 16, requires_grad=True)
    assert ours().apply(q, q, q, True).shape == q.shape

def test_wrong():
    assert ours() is None

@pytest.mark.skip
def test_skipped():
    pass
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "test_attention.py").write_text(THEIRS)
    return tmp_path


def test_what_their_tests_say_is_counted(checkout, monkeypatch, capsys):
    record = checkout / "judged.json"
    monkeypatch.setattr(command, "RECORD", record)
    assert command.main(["cs336", str(checkout), "--record"]) == 1
    counts = command.recorded()["cs336"]
    assert [counts[kind] for kind in ("passed", "failed", "skipped by themselves")] == [1, 1, 1]
    assert counts["failures"] == ["test_wrong"] and "test_wrong" in capsys.readouterr().out
    assert command.main([]) == 0 and "cs336" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, message",
    [
        (["nobody"], "suite: got 'nobody'; it takes flash-attention-2"),
        (["cs336"], "checkout: got none; it takes a folder"),
        (["cs336", "nowhere"], "checkout: got nowhere, where there is no tests/test_attention.py"),
    ],
)
def test_what_cannot_be_run_is_refused(argv, message):
    with pytest.raises(ValueError, match=message):
        command.main(argv)


@pytest.mark.parametrize(
    "suite, test, case, left_out",
    [
        ("flash-attention-2", "test_flash_attn_output", {"alibi": True}, "ALiBi"),
        ("flash-attention-2", "test_flash_attn_output", {"dropout_p": 0.0, "alibi": False}, ""),
        ("flash-attention-3", "test_flash_attn_output", {"dtype": torch.float8_e4m3fn}, "FP8"),
        ("flash-attention-4", "test_flash_attn_output", {"local_enum": 2}, "windows of negative size"),
        ("flash-attention-4", "test_flash_attn_varlen_output", dict(local_enum=2, unpad_q=True, unpad_kv=True), ""),
    ],
)
def test_only_what_we_have_not_is_left_out(suite, test, case, left_out):
    assert SUITES[suite].left_out(test, case) == left_out


def test_adapters_hand_every_argument_on():
    q, k, v = (torch.randn(1, n, 2, 16, dtype=torch.float16) for n in (7, 9, 9))
    masks = dict(window=(3, 1), softcap=5.0, scale=0.5)
    O, L = fa2_lab.attention(*(x.transpose(1, 2) for x in (q, k, v)), return_lse=True, **masks)
    O, given = O.transpose(1, 2), dict(window_size=(3, 1), softcap=5.0, softmax_scale=0.5)
    starts = [torch.tensor([0, n], dtype=torch.int32) for n in (7, 9)]
    for found in (
        two.flash_attn_func(q, k, v, **given),
        two.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **given),
        two.flash_attn_varlen_func(q[0], k[0], v[0], *starts, 7, 9, **given)[None],
        three.flash_attn_func(q, k, v, **given),
        three.flash_attn_varlen_func(q[0], k[0], v[0], *starts, 7, 9, **given)[None],
        four.flash_attn_func(q, k, v, **given)[0],
        four.flash_attn_varlen_func(q[0], k[0], v[0], *starts, **given)[0][None],
    ):
        assert torch.allclose(found, O, atol=2e-3)
    assert torch.allclose(two.flash_attn_func(q, k, v, **given, return_attn_probs=True)[1], L, atol=2e-3)
