"""The arguments of Hopper's launches, on tensors without data: masks, ragged tiles, strides, and buffers for sums."""

from itertools import product
from math import log

import pytest
import torch

pytest.importorskip("triton")
host = pytest.importorskip("fa2_lab.kernels.hopper.shared.host", reason="this Triton's Gluon is too old")

from fa2_lab.kernels.arguments import Options, Tensors  # noqa: E402
from fa2_lab.kernels.hopper.backward import configs as backward_configs  # noqa: E402
from fa2_lab.kernels.hopper.backward import launch as backward  # noqa: E402
from fa2_lab.kernels.hopper.forward import configs as forward_configs  # noqa: E402
from fa2_lab.kernels.hopper.forward import launch as forward  # noqa: E402
from fa2_lab.kernels.launches import program_count  # noqa: E402


@pytest.fixture(autouse=True)
def as_on_hopper(monkeypatch):
    """Treat tensors without data as if they were on a Hopper GPU."""
    monkeypatch.setattr(host, "tma_aligned", lambda *tensors: True)
    monkeypatch.setattr(host, "scheduler_counter", lambda X, in_custom_op: "its own" if in_custom_op else "counter")


def meta_qk(batch, H, H_kv, N_q, N_k, d, packed=False):
    """Return Q and K without data. Packed sequences are (tokens, heads, d)."""
    shapes = ((N_q, H, d), (N_k, H_kv, d)) if packed else ((batch, H, N_q, d), (batch, H_kv, N_k, d))
    return [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]


def gapped(x):
    """Return a tensor of the same shape with gaps between the rows."""
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


FORWARD_CASES = [  # batch, H, H_kv, N_q, N_k, d, causal, with key_lengths, packed sequences
    ((2, 4, 2, 300, 512, 128), False, False, None),
    ((2, 4, 2, 300, 512, 128), False, True, None),
    ((1, 8, 1, 1000, 1000, 64), True, False, None),
    ((3, 16, 4, 4096, 4096, 128), True, False, None),
    ((8, 16, 4, 8192, 8192, 64), True, False, None),
    ((1, 4, 2, 1024, 1024, 128), False, False, 4),  # rows in whole tiles: a sequence need not be
    ((1, 40, 20, 1024, 1024, 64), True, False, 2),
    ((1, 2, 2, 64, 128, 32), False, False, None),
]


def other_tensors(batch, lengths, sequences):
    """Return the other tensors of a call: key_lengths, cu_seqlens_q and cu_seqlens_k, each a tensor or None."""
    keys = torch.empty(batch, device="meta", dtype=torch.int32) if lengths else None
    starts = (None if sequences is None else torch.empty(sequences + 1, device="meta") for _ in "qk")
    return dict(zip(("key_lengths", "cu_seqlens_q", "cu_seqlens_k"), (keys, *starts), strict=True))


@pytest.mark.parametrize("shape, causal, lengths, sequences", FORWARD_CASES)
def test_hopper_forward_launch_arguments_fit_the_call(shape, causal, lengths, sequences, monkeypatch):
    batch, H, H_kv, N_q, N_k, _ = shape
    Q, K = meta_qk(*shape, packed=sequences is not None)
    others = other_tensors(batch, lengths, sequences)
    launch = forward.prepare_launch(Tensors(Q, K, K, **others), Options(causal, 0.1))
    args, config = launch.arguments, launch.arguments["CONFIG"]
    assert args["RAGGED"] is (lengths or sequences is not None or N_k % config.B_c != 0)
    assert (args["CAUSAL"], args["group"], args["sequences"], args["left"]) == (causal, H // H_kv, sequences, None)
    assert args["scale_log2"] == pytest.approx(0.1 / log(2))
    rows = [described.block_shape[-2:] for described in launch.descriptors]
    assert rows == [[n, config.d_pad] for n in (64, config.B_c, config.B_c, 64)]

    called, V = [], torch.empty_like(K)
    monkeypatch.setattr(forward, "prepare_launch", lambda *kind: lambda *tensors: called.extend(tensors))
    given = Tensors(Q, K, V, **others)
    O, L = forward.prepare(given, Options(causal, 0.1, in_custom_op=causal))(given)
    assert O.shape == Q.shape and L.shape == ((batch, H, N_q) if sequences is None else (H, N_q))
    want = Q, K, V, O, L, "its own" if causal else "counter", *others.values()
    assert all(x is y for x, y in zip(called, want, strict=True))


@pytest.mark.parametrize("causal, left, right", [(False, 3, None), (True, 3, None), (False, None, 0)])
def test_hopper_forward_uses_its_own_config_for_windows(causal, left, right, monkeypatch):
    options = Options(causal, 0.1, left=left, right=right)
    Q, K = meta_qk(1, 2, 1, 500, 600, 64)
    args = forward.prepare_launch(Tensors(Q, K, K), options).arguments
    assert args["CONFIG"] == forward_configs.HALF_B_C[64] and args["CAUSAL"] is options.causal
    assert (args["left"], args["right"]) == (options.left, options.right)
    for d, accepted in ((32, True), (128, True), (192, False)):
        wide = meta_qk(1, 2, 1, 500, 600, d)
        assert (forward.prepare(Tensors(wide[0], wide[1], wide[1]), options) is not None) is accepted
    launches = []
    monkeypatch.setattr(backward, "Launch", lambda *setting, **arguments: launches.append(arguments))
    backward.prepare(Q, Q, Tensors(Q, K, K), options)
    main = launches[1]
    assert (main["CAUSAL"], main["left"], main["right"]) == (options.causal, options.left, options.right)
    assert main["l2_group"] == main["heads"] > 1, "as under the causal mask"
    Q, K = meta_qk(1, 2, 1, 500, 640, 128)
    assert not backward.choose(Tensors(Q, K, K), options, False)[0].v_in_registers
    Q, K = meta_qk(1, 2, 1, 500, 600, 64, packed=True)
    packed = Tensors(Q, K, K, **other_tensors(1, False, 2))
    assert forward.prepare(packed, options) is None and backward.prepare(Q, Q, packed, options) is None


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("shape, causal, lengths, sequences", FORWARD_CASES)
def test_hopper_backward_launches_and_workspaces_fit_the_call(
    shape, causal, lengths, sequences, parts, deterministic, monkeypatch
):
    """Sums of dQ, then of dK and dV where column blocks are divided, then semaphores: none in the place of another."""
    batch, H, H_kv, _, N_k, _ = shape
    Q, K = meta_qk(*shape, packed=sequences is not None)
    others, called = other_tensors(batch, lengths, sequences), {}
    starts = others["cu_seqlens_q"], others["cu_seqlens_k"]

    def launch(kernel, *setting, **arguments):
        return lambda *tensors: called.update({kernel.fn.__name__: (setting, arguments, tensors)})

    monkeypatch.setattr(backward_configs, "choose_parts", lambda *_: parts)
    monkeypatch.setattr(backward, "Launch", launch)
    Q, K = gapped(Q), gapped(K)  # rows with gaps between them, as those of dO
    L, V, O, dO = *(torch.empty_like(x) for x in (Q[..., 0], K, Q)), Q[:]
    inputs = Tensors(Q, K, V, **others)
    call = backward.prepare(dO, O, inputs, Options(causal, 0.1, in_custom_op=causal), deterministic)
    dQ, dK, dV = call(dO, "dL", O, L, inputs)
    assert [x.shape for x in (dQ, dK, dV)] == [Q.shape, K.shape, K.shape]

    (_, _, descriptors), args, passed = called["backward_kernel"]
    *main, start, sums, dK_at, dV_at, counter, keys, semaphore, cu_seqlens_q, cu_seqlens_k = passed
    assert all(x is y for x, y in zip(main, (Q, K, V, dO), strict=True)) and keys is others["key_lengths"]
    assert cu_seqlens_q is starts[0] and cu_seqlens_k is starts[1] and counter == ("its own" if causal else "counter")
    ragged, config = lengths or sequences is not None or N_k % 128 != 0, args["CONFIG"]
    assert (args["RAGGED"], args["CAUSAL"], args["group"], args["parts"]) == (ragged, causal, H // H_kv, parts)
    assert args["scale_log2"] == pytest.approx(0.1 / log(2))
    assert {x.block_shape[-1] for x in descriptors[:4]} == {config.d_pad}
    assert args["heads"] == batch * H_kv * parts >= args["l2_group"]
    row_blocks, column_blocks = len(start), program_count(K, 128, sequences)
    assert args["T_r"] * batch * H == row_blocks and start.shape[1] == 2 * config.B_r

    tile = 64 * config.d_pad  # numbers of 64 rows
    regions = [(0, row_blocks * config.B_r * config.d_pad)]
    if parts > 1:
        regions += [(x.storage_offset(), column_blocks * 128 * config.d_pad) for x in (dK_at, dV_at)]
    else:
        assert dK_at is dK and dV_at is dV
    if deterministic:
        regions.append((semaphore.storage_offset(), 2 * (row_blocks + column_blocks)))
        assert semaphore.numel() >= regions[-1][1]
    assert (semaphore is None) is not deterministic
    for (begin, number), (later, _) in zip(regions, [*regions[1:], (sums.numel(), 0)], strict=True):
        assert begin % tile == 0 and begin + number <= later, "one lies in another's place"
    (cleared, *_), before, given = called["bwd_preprocess"]
    want = O, dO, L, "dL", start, sums, starts[0], starts[1] if deterministic else None
    assert all(x is y for x, y in zip(given, want, strict=True))
    assert (before["O_strides"], before["dO_strides"]) == (backward.dense_strides(O), backward.dense_strides(dO))
    assert before["tiles"] * tile == sums.numel() and cleared == row_blocks * config.B_r // 64
    (added, *_), after, (*given, dK_out, dV_out, cu_seqlens_q, cu_seqlens_k) = called["bwd_postprocess"]
    assert given[0] is sums and given[1] is dQ and cu_seqlens_q is starts[0] and cu_seqlens_k is starts[1]
    assert (dK_out is dK and dV_out is dV) if parts > 1 else dK_out is dV_out is None
    assert after["strides"] == tuple(map(backward.dense_strides, (dQ, dK, dV))) and after["N_k"] == N_k
    assert added == 2 * row_blocks + 4 * column_blocks * (parts > 1) and after["scale"] == 0.1


def by_rows(x):
    """Return a tensor of the same shape that is stored as (batch, N, heads, d)."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


# No heads to join, a mask, or tensors in another order: options, with key_lengths, K/V heads, q, dO, O
UNPACKED_CASES = [
    (Options(False, 0.1), False, 4, None, None, None),
    (Options(True, 0.1), False, 2, None, None, None),
    (Options(False, 0.1, left=900), False, 2, None, None, None),
    (Options(False, 0.1, right=900), False, 2, None, None, None),
    (Options(False, 0.1), True, 2, None, None, None),
    *[(Options(False, 0.1), False, 2, *odd) for odd in product((None, gapped, by_rows), repeat=3) if any(odd)],
]


@pytest.mark.parametrize("options, lengths, H_kv, odd_q, odd_dO, odd_O", UNPACKED_CASES)
def test_calls_that_need_row_positions_are_not_packed(options, lengths, H_kv, odd_q, odd_dO, odd_O, monkeypatch):
    Q, K = meta_qk(2, 4, H_kv, 300, 512, 64)
    q, dO, O = (odd(Q) if odd else Q for odd in (odd_q, odd_dO, odd_O))
    inputs = Tensors(q, K, K, **other_tensors(2, lengths, None))
    for more in ((dO, O), (q,)) if odd_q else ((dO, O),):
        unpacked = host.pack_gqa(inputs, options, *more)
        assert all(x is y for x, y in zip(unpacked, (inputs, *more), strict=True))
    prepared, launches = [], []
    monkeypatch.setattr(forward, "prepare_launch", lambda tensors, options: prepared.append(tensors))
    monkeypatch.setattr(backward, "Launch", lambda *setting, **arguments: launches.append((setting, arguments)))
    forward.prepare(inputs, options)
    backward.prepare(dO, O, inputs, options)
    joined = not (odd_q or lengths or H_kv == 4 or options.bounds != (None, None))
    assert (prepared[0] is inputs) is not joined, "the forward asks about Q alone"
    assert launches[0][1]["H"] == 4 and launches[1][0][3][0].shape == [2, 4, 300, 64] == launches[1][0][3][3].shape
    assert launches[1][1]["group"] == 4 // H_kv and launches[2][1]["H"] == 4


def test_packed_sequences_do_not_pack_query_heads():
    Q, K = meta_qk(1, 4, 2, 300, 512, 64, packed=True)
    tensors = Tensors(Q, K, K, **other_tensors(1, False, 2))
    assert host.pack_gqa(tensors, Options(False, 0.1), Q)[0] is tensors


@pytest.mark.parametrize("d", (64, 128))
@pytest.mark.parametrize("H, H_kv, N_q, N_k", [(4, 2, 300, 512), (8, 1, 344, 344), (64, 8, 192, 1000), (6, 3, 1, 77)])
def test_unmasked_grouped_query_heads_are_packed_as_rows(H, H_kv, N_q, N_k, d, monkeypatch):
    """The launches are those of H_kv heads of g · N rows, whereas tensors and results keep their shapes."""
    (Q, K), rows = meta_qk(2, H, H_kv, N_q, N_k, d), H // H_kv * N_q
    inputs, options = Tensors(Q, K, torch.empty_like(K)), Options(False, 0.1)
    packed = Tensors(*meta_qk(2, H_kv, H_kv, rows, N_k, d), K)
    prepare_launch, prepared, passed = forward.prepare_launch, [], []

    def watched(*given):
        prepared.append(prepare_launch(*given))
        return lambda *tensors: passed.append(tensors)

    monkeypatch.setattr(forward, "prepare_launch", watched)
    O, L = forward.prepare(inputs, options)(inputs)
    want = prepare_launch(packed, options)
    assert [x.shape for x in prepared[0].descriptors] == [[2, H_kv, N, d] for N in (rows, N_k, N_k, rows)]
    assert [x.strides for x in prepared[0].descriptors] == [x.strides for x in want.descriptors]
    assert prepared[0].arguments == want.arguments and prepared[0].grid == want.grid
    assert passed[0][0] is Q and passed[0][3] is O and passed[0][4] is L
    assert O.shape == Q.shape and L.shape == Q.shape[:3] and O.is_contiguous() and L.is_contiguous()

    def launches(*given):
        recorded = []

        def launch(kernel, *setting, **arguments):
            recorded.append((kernel, setting[:2], [x.shape for x in (*setting[2:], ())[0]], arguments))
            return lambda *tensors: passed.append(tensors)

        monkeypatch.setattr(backward, "Launch", launch)
        return recorded, backward.prepare(*given)

    for deterministic in (False, True):
        recorded, call = launches(Q, O, inputs, options, deterministic)
        assert recorded == launches(packed.q, packed.q, packed, options, deterministic)[0]
        before, main, after = (arguments for *_, arguments in recorded)
        assert before["H"] == after["H"] == H_kv and before["N_q"] == rows and main["group"] == 1
        passed.clear()
        dQ, dK, dV = call(Q, "dL", O, L, inputs)
        assert passed[0][:4] == (O, Q, L, "dL") and passed[1][0] is Q and passed[1][3] is Q and passed[2][1] is dQ
        assert dQ.shape == Q.shape and dK.shape == dV.shape == K.shape and dQ.is_contiguous()


def test_hopper_calls_check_the_alignment_of_every_tensor(monkeypatch):
    Q, K = meta_qk(1, 2, 1, 300, 300, 64)
    checked = []
    monkeypatch.setattr(host, "tma_aligned", lambda *tensors: checked.append(tensors))
    dO, dL, O, L, *given = all_tensors = [torch.empty_like(x) for x in (Q, Q[..., 0], Q, Q[..., 0], Q, K, K)]
    given, options = Tensors(*given), Options(False, 0.1)
    assert backward.prepare(dO, O, given, options)(dO, dL, O, L, given) is None
    assert forward.prepare(given, options)(given) is None
    assert [set(map(id, x)) for x in checked] == [set(map(id, all_tensors)), set(map(id, all_tensors[4:]))]


@pytest.mark.parametrize("packed", (False, True))
def test_hopper_accepts_expanded_heads_and_allocates_full_gradients(packed, monkeypatch):
    """The copy engine steps 0 bytes from head to head; what it writes to has memory for each head."""
    Q, K = meta_qk(1, 4, 1, 500, 600, 64, packed=packed)
    K = K.expand(*K.shape[:-2], 4, 64) if packed else K.expand(1, 4, 600, 64)
    options, inputs = Options(True, 0.1), Tensors(Q, K, K, **other_tensors(1, False, 2 if packed else None))
    described = forward.prepare_launch(inputs, options).descriptors
    assert [0 in x.strides for x in described] == [False, True, True, False]
    settings = []
    launch = lambda *setting, **arguments: settings.append(setting) or (lambda *tensors: None)  # noqa: E731
    monkeypatch.setattr(backward, "Launch", launch)
    call = backward.prepare(Q, Q, inputs, options)
    assert [0 in x.strides for x in settings[1][3][:4]] == [False, True, True, False]
    assert all(x.is_contiguous() for x in call(Q, None, Q, Q[..., 0], inputs))


def test_each_stream_and_graph_has_its_own_scheduler_counter(monkeypatch):
    monkeypatch.undo()
    stream, capturing = [7], [False]
    monkeypatch.setattr(host, "current_stream", lambda X: stream[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    X = torch.empty(1)
    first, counter = host.scheduler_counter(X, False), lambda: host.scheduler_counter(X, False)
    assert first.tolist() == [0, 0] and first.dtype == torch.int32 and counter() is first
    assert host.scheduler_counter(X, True) is not first, "one that torch may record belongs to the graph"
    stream[0] = 8
    assert counter() is not first
    stream[0], capturing[0] = 7, True
    assert counter() is not first and counter() is not counter()
