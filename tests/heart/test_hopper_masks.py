"""Windows, and gradients with the same bits, by Hopper's own kernels: right on such a GPU, and what they cost there."""

from functools import partial
from itertools import product

import pytest
import torch
from kernel_truth import milliseconds, worst  # before Triton
from slices import alone, once

pytest.importorskip("triton")

from fa2_lab import attention
from fa2_lab.kernels.prepared import Options

DTYPES = (torch.float16, torch.bfloat16)
PAIRS = [(1, 239), (113, 203), (300, 50), (192, 192), (127, 513), (1023, 1024), (2100, 1999), (1100, 1100)]
WINDOWS = [(0, 0), (7, 0), (200, 0), (None, 40), (64, None), (130, 127), (1000, 0), (70, 300)]


def draw(batch, heads, N, d, dtype, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn((batch, heads, N, d), device="cuda", generator=generator).to(dtype)


def options_of(window, d) -> Options:
    left, right = window
    return Options(right == 0, d**-0.5, left=left, right=right or None)


def truth(Q, K, V, dO, window, lengths, dtype=torch.float64):
    """O, L, dQ, dK, dV, plainly, in float64 or as torch would round them."""
    q, k, v = (x.to(dtype).requires_grad_() for x in (Q, K, V))
    left, right = window
    (N_q, d), N_k, group = q.shape[2:], k.shape[2], q.shape[1] // k.shape[1]
    at = torch.arange(N_q, device="cuda")[:, None] + N_k - N_q
    col = torch.arange(N_k, device="cuda")[None, :]
    sees = (col >= at - (N_k + N_q if left is None else left)) & (col <= at + (N_k + N_q if right is None else right))
    real = torch.full((len(Q),), N_k, device="cuda") if lengths is None else lengths.clamp(0, N_k)
    sees = sees & (col < real[:, None, None])
    kk, vv = (x.repeat_interleave(group, 1) for x in (k, v))
    s = (q @ kk.mT * d**-0.5).float() if dtype != torch.float64 else q @ kk.mT * d**-0.5
    s = s.masked_fill(~sees[:, None], -torch.inf)
    L = s.logsumexp(3)
    p = torch.exp(s - L.masked_fill(L == -torch.inf, 0)[..., None])
    O = p.to(dtype) @ vv
    gradients = torch.autograd.grad(O, (q, k, v), dO.to(dtype))
    return O.detach(), L.detach(), *(x.nan_to_num() for x in gradients)


def hidden(K, V, N_q, window, lengths):
    """K and V with NaN where no row sees them."""
    N_k, left = K.shape[2], window[0]
    col = torch.arange(N_k, device="cuda")
    unseen = col[None, :] >= (torch.full((len(K),), N_k, device="cuda") if lengths is None else lengths)[:, None]
    if left is not None:
        unseen = unseen | (col < N_k - N_q - left)[None, :]
    return [x.masked_fill(unseen[:, None, :, None], float("nan")) for x in (K, V)]


def poison(*tensors) -> None:
    """Leave NaN in the memory that outputs and sums are likely to get."""
    keep = [torch.full_like(x, float("nan")) for x in tensors for _ in range(2)]
    keep += [torch.full((x.numel() + 128 * 128,), float("nan"), device="cuda") for x in tensors]
    del keep


def computed(Q, K, V, dO, options, lengths, same_bits=False):
    """O, L, dQ, dK and dV by Hopper's own kernels."""
    from fa2_lab.kernels.hopper.backward import launch as backward
    from fa2_lab.kernels.hopper.forward import launch as forward

    poison(Q, K)
    O, L = forward.prepare(Q, K, V, options, lengths)(Q, K, V, lengths)
    poison(Q, K)
    call = backward.prepare(dO, Q, K, V, O, options, lengths, same_bits)
    return O, L, *call(dO, Q, K, V, O, L, None, lengths)


def check(Q, K, V, dO, window, lengths, same_bits=False):
    want, theirs = (truth(Q, K, V, dO, window, lengths, dtype) for dtype in (torch.float64, Q.dtype))
    K, V = hidden(K, V, Q.shape[2], window, lengths)
    got = computed(Q, K, V, dO, options_of(window, Q.shape[3]), lengths, same_bits)
    for name, x, y, z in zip(("O", "L", "dQ", "dK", "dV"), got, want, theirs, strict=False):
        assert worst(x, y) <= 3 * worst(z, y) + 1e-5, (
            name,
            Q.shape,
            K.shape,
            window,
            lengths,
            worst(x, y),
            worst(z, y),
        )


def cases(d, dtype, window, pair, padded, heads=(6, 2)):
    (N_q, N_k), (H, H_kv) = pair, heads
    Q, dO = draw(2, H, N_q, d, dtype, 0), draw(2, H, N_q, d, dtype, 1)
    K, V = draw(2, H_kv, N_k, d, dtype, 2), draw(2, H_kv, N_k, d, dtype, 3)
    return Q, K, V, dO, window, torch.tensor([N_k // 3, N_k], dtype=torch.int32, device="cuda") if padded else None


# Windows ------------------------------------------------------------------------------------------------------


@hopper
@pytest.mark.parametrize("d, window", [*product((64, 128), WINDOWS), *once((32, 96), WINDOWS)], ids=str)
def test_windows(d, window):
    for pair, dtype, padded in once(PAIRS, DTYPES, (False, True)):
        check(*cases(d, dtype, window, pair, padded))


@hopper
@pytest.mark.parametrize("d", (64, 128))
def test_windows_over_long_rows_and_column_blocks_in_parts(d, monkeypatch):
    from fa2_lab.kernels.hopper.backward import sizes

    for window, padded, parts in once(WINDOWS, (False, True), (1, 4, 100)):
        monkeypatch.setattr(sizes, "parts_for", lambda *_, parts=parts: parts)
        check(*cases(d, torch.bfloat16, window, (4100, 3900), padded, heads=(2, 1)))


# The same bits ------------------------------------------------------------------------------------------------


@hopper
@pytest.mark.parametrize("d", (64, 96, 128))
def test_gradients_in_turn_are_right(d, monkeypatch):
    from fa2_lab.kernels.hopper.backward import sizes

    masks = ((None, None), (None, 0), (130, 127), (200, 0))
    for pair, dtype, window, padded, parts in once(PAIRS, DTYPES, masks, (False, True), (1, 1, 3, 100)):
        monkeypatch.setattr(sizes, "parts_for", lambda *_, parts=parts: parts)
        check(*cases(d, dtype, window, pair, padded), same_bits=True)


@hopper
@pytest.mark.parametrize("busy", (False, True), ids=("alone", "beside other work"))
@pytest.mark.parametrize(
    "d, N, H_kv, causal", [*product((64, 128), (1000, 4096), (8,), (False, True)), (128, 4096, 1, True)]
)
def test_the_same_bits_200_times(d, N, H_kv, causal, busy):
    """Also where another stream keeps SMs busy, so that programs start late and in another order."""
    from fa2_lab.kernels.hopper.backward.launch import prepare
    from fa2_lab.kernels.hopper.forward.launch import forward

    Q, K, V, dO = (draw(2, H, N, d, torch.bfloat16, seed) for seed, H in enumerate((8, H_kv, H_kv, 8)))
    options = Options(causal, 0.1)
    O, L = forward(Q, K, V, options)
    call = prepare(dO, Q, K, V, O, options, same_bits=True)
    first = call(dO, Q, K, V, O, L, None, None)
    differ, beside = torch.zeros((), dtype=torch.bool, device="cuda"), torch.cuda.Stream()
    A = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for _ in range(200):
        if busy:
            with torch.cuda.stream(beside):
                A @ A
        for x, y in zip(call(dO, Q, K, V, O, L, None, None), first, strict=True):
            differ |= (x != y).any()
            x.fill_(float("nan"))
    assert not differ


@hopper
def test_behind_the_public_call(monkeypatch):
    """attention() has Hopper's own kernels do it."""
    from fa2_lab.kernels import choice

    monkeypatch.setattr(choice, "portable_backward", None)
    q, k, v, dO = cases(128, torch.bfloat16, (None, 0), (1100, 1100), padded=False)[:4]
    for window, same_bits in (((200, 0), False), ((None, 0), True), ((200, 0), True)):
        torch.use_deterministic_algorithms(same_bits)
        try:
            given = [x.clone().requires_grad_() for x in (q, k, v)]
            O = attention(*given, window=window)
            got = O, *torch.autograd.grad(O, given, dO)
        finally:
            torch.use_deterministic_algorithms(False)
        want, theirs = (truth(q, k, v, dO, window, None, dtype) for dtype in (torch.float64, q.dtype))
        for x, y, z in zip(got, (want[0], *want[2:]), (theirs[0], *theirs[2:]), strict=True):
            assert worst(x, y) <= 3 * worst(z, y) + 1e-5


@alone
@hopper
def test_what_they_cost():
    """In turn takes at most a fifth more than in any order; a window less than all. -s prints it."""
    from fa2_lab.kernels.hopper.backward.launch import prepare
    from fa2_lab.kernels.hopper.forward import launch as forward

    for d, N, causal in product((64, 128), (4096, 8192, 16384), (False, True)):
        Q, K, V, dO = (draw(16384 // N, 2048 // d, N, d, torch.bfloat16, seed) for seed in range(4))
        options = Options(causal, d**-0.5)
        near = options._replace(left=1023) if causal else options
        O, L = forward.forward(Q, K, V, options)
        columns = [prepare(dO, Q, K, V, O, *kind) for kind in ((options, None, False), (options, None, True), (near,))]
        fast, in_turn, back = (milliseconds(partial(call, dO, Q, K, V, O, L, None, None)) for call in columns)
        all_keys, ahead = (milliseconds(partial(forward.prepare(Q, K, V, o), Q, K, V, None)) for o in (options, near))
        print(
            f"\nd {d}, N {N}, {'causal' if causal else 'full'}: backward {fast:.3f} ms, in turn {in_turn / fast:.3f}",
            end="",
        )
        if causal:
            print(f"; 1,024 keys instead of all: forward {ahead / all_keys:.2f}, backward {back / fast:.2f}", end="")
        assert in_turn < 1.2 * fast and (not causal or max(ahead / all_keys, back / fast) < 1)
