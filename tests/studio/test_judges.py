"""Other projects' tests, run on our calls. A small checkout that the test writes replaces the other project."""

import subprocess

import pytest
import torch

import fa2_lab
from fa2_studio.judges import command
from fa2_studio.judges.adapters import flash_attention_2 as fa2_adapter
from fa2_studio.judges.adapters import flash_attention_3 as fa3_adapter
from fa2_studio.judges.adapters import flash_attention_4 as fa4_adapter
from fa2_studio.judges.adapters import flashinfer, torch_varlen, vllm
from fa2_studio.judges.suites import SUITES

THIRD_PARTY_TESTS = """
import pytest, torch
from .adapters import get_flashattention_autograd_function_pytorch as ours

def test_right():
    q = torch.randn(2, 5, 16, requires_grad=True)
    assert ours().apply(q, q, q, True).shape == q.shape

def test_wrong():
    assert ours() is None

def test_without_its_fixture(nowhere):
    pass

@pytest.mark.skip
def test_skipped():
    pass
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "test_attention.py").write_text(THIRD_PARTY_TESTS)
    return tmp_path


def test_outcomes_of_third_party_tests_are_counted(checkout, monkeypatch, capsys):
    record = checkout / "judged.json"
    monkeypatch.setattr(command, "RECORD", record)
    assert command.main(["cs336", str(checkout), "--record"]) == 1
    counts = command.load_outcomes()["cs336"]
    assert [counts[kind] for kind in ("passed", "failed", "skipped by themselves")] == [1, 2, 1]
    assert counts["failures"] == ["test_wrong", "test_without_its_fixture"] and "test_wrong" in capsys.readouterr().out
    assert command.main([]) == 0 and "cs336" in capsys.readouterr().out


def test_third_party_tests_that_do_not_start_are_an_error(checkout):
    (checkout / "tests" / "test_attention.py").write_text("import nothing_of_that_name")
    with pytest.raises(ValueError, match="tests did not start"):
        command.main(["cs336", str(checkout)])


def test_missing_imports_of_third_party_tests_are_named(tmp_path, monkeypatch):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_varlen_attention.py").touch()
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="suite: torch's varlen attention's tests import expecttest; pip install exp"):
        command.main(["torch", str(tmp_path)])


def test_third_party_checkout_at_another_commit_is_refused(checkout):
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=b"]
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *arguments], check=True)
    with pytest.raises(ValueError, match=r"checkout: got commit [0-9a-f]{8}; it takes 9d95f3b5"):
        command.main(["cs336", str(checkout)])


@pytest.mark.parametrize(
    "argv, message",
    [
        (["nobody"], "suite: got 'nobody'; it takes flash-attention-2"),
        (["cs336"], "checkout: got none; it takes a folder"),
        (["cs336", "nowhere"], "checkout: got nowhere, where there is no tests/test_attention.py"),
    ],
)
def test_judge_rejects_bad_arguments(argv, message):
    with pytest.raises(ValueError, match=message):
        command.main(argv)


@pytest.mark.parametrize(
    "suite, test, case, reason",
    [
        ("flash-attention-2", "test_flash_attn_output", {"alibi": True}, "ALiBi"),
        ("flash-attention-2", "test_flash_attn_output", {"dropout_p": 0.0, "alibi": False}, ""),
        ("flash-attention-3", "test_flash_attn_output", {"dtype": torch.float8_e4m3fn}, "FP8"),
        ("flash-attention-4", "test_flash_attn_output", {"local_enum": 2}, "windows of negative size"),
        ("torch", "test_custom_op_compliance_cuda_float16", {}, "the registration of their own operator"),
        ("vllm", "test_varlen_with_paged_kv", dict(q_dtype=None, fa_version=2), ""),
        ("flashinfer", "test_attention_sink", dict(backend="fa3"), "the same call again"),
        ("transformers", "test_eager_matches_sdpa_inference_01_fp16_pad_left", {}, ""),
        ("flash-attention-4", "test_flash_attn_varlen_output", dict(local_enum=2, unpad_q=True, unpad_kv=True), ""),
    ],
)
def test_only_third_party_tests_of_missing_features_are_skipped(suite, test, case, reason):
    given = SUITES[suite].reason_to_leave_out(test, case)
    assert given.startswith(reason) and bool(given) == bool(reason)


def test_adapters_pass_every_argument():
    q, k, v = (torch.randn(1, n, 2, 16, dtype=torch.float16) for n in (7, 9, 9))
    masks = dict(window=(3, 1), softcap=5.0, scale=0.5)
    O, L = fa2_lab.attention(*(x.transpose(1, 2) for x in (q, k, v)), return_lse=True, **masks)
    O, given = O.transpose(1, 2), dict(window_size=(3, 1), softcap=5.0, softmax_scale=0.5)
    starts = [torch.tensor([0, n], dtype=torch.int32) for n in (7, 9)]
    for found in (
        fa2_adapter.flash_attn_func(q, k, v, **given),
        fa2_adapter.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **given),
        fa2_adapter.flash_attn_varlen_func(q[0], k[0], v[0], *starts, 7, 9, **given)[None],
        fa3_adapter.flash_attn_func(q, k, v, **given),
        fa3_adapter.flash_attn_varlen_func(q[0], k[0], v[0], *starts, 7, 9, **given)[None],
        fa4_adapter.flash_attn_func(q, k, v, **given)[0],
        fa4_adapter.flash_attn_varlen_func(q[0], k[0], v[0], *starts, **given)[0][None],
    ):
        assert torch.allclose(found, O, atol=2e-3)
    pages, table, lengths = [x.view(3, 3, 2, 16) for x in (k, v)], torch.tensor([[0, 1, 2]]), torch.tensor([9])
    found = vllm.flash_attn_varlen_func(q[0], *pages, starts[0], lengths, table, **given)
    assert torch.allclose(found, O[0], atol=2e-3)
    assert torch.allclose(fa2_adapter.flash_attn_func(q, k, v, **given, return_attn_probs=True)[1], L, atol=2e-3)


def test_packed_and_paged_adapters_agree():
    """Two sequences of one and of four rows; FlashInfer's pages have one key each."""
    q, k, v = (torch.randn(n, 2, 16) for n in (5, 9, 9))
    cu_seqlens_q, cu_seqlens_k = torch.tensor([0, 1, 5], dtype=torch.int32), torch.tensor([0, 3, 9], dtype=torch.int32)
    sinks = torch.tensor([0.5, 2.0])
    want = fa2_lab.attention_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, window=(3, None), sinks=sinks, scale=0.5)
    masks = dict(causal=False, window_left=3)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper()
    ragged.plan(cu_seqlens_q, cu_seqlens_k, 2, 2, 16, **masks)
    assert torch.allclose(ragged.run(q, k, v, sinks, 0.5), want, atol=1e-5)
    over_pages = flashinfer.BatchAttentionWithAttentionSinkWrapper()
    order = torch.randperm(9)
    over_pages.plan(
        cu_seqlens_q, cu_seqlens_k, order.argsort().int(), torch.ones(2, dtype=torch.int32), 2, 2, 16, 1, **masks
    )
    assert torch.allclose(over_pages.run(q, (k[order], v[order]), sinks, 0.5), want, atol=1e-5)
    want = fa2_lab.attention_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, window=(3, 1))
    assert torch.allclose(
        torch_varlen.varlen_attn(q, k, v, cu_seqlens_q, cu_seqlens_k, 4, 6, window_size=(3, 1)), want, atol=1e-5
    )
