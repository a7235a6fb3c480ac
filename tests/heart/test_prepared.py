"""The cache of prepared calls: which calls share an entry, which must not, and that it keeps no tensor alive."""

import gc
import weakref
from inspect import signature

import pytest
import torch
from kernel_truth import DEVICE, largest_error, random_inputs

from fa2_lab.api.attention import attention
from fa2_lab.api.options import GivenOptions, find_prepared, given_options
from fa2_lab.api.packed import attention_packed
from fa2_lab.api.paged import attention_paged
from fa2_lab.kernels import cache, dispatch
from fa2_lab.kernels.arguments import Options, Tensors


def qkv():
    return [x.detach() for x in random_inputs(2, 4, 2, 20, 24, 16)[:3]]


def test_cache_prepares_once_and_clears_together():
    prepared = []
    assert cache.get_or_prepare("a kind", lambda x: prepared.append(x) or prepared, 3) is prepared
    assert cache.get_or_prepare("a kind", lambda x: prepared.append(x), 4) is prepared and prepared == [3]
    lengths = torch.tensor([3])
    cache.mark_checked(lengths, (5,))
    assert cache.was_checked(lengths, (5,))
    cache.clear_caches()
    assert not cache.was_checked(lengths, (5,))
    assert cache.get_or_prepare("a kind", lambda: prepared.clear()) is None  # is also what was made, and kept
    assert cache.get_or_prepare("a kind", lambda: 5) is None


def test_cache_size_is_bounded(monkeypatch):
    monkeypatch.setattr(cache, "MAX_ENTRIES", 3)
    for n in range(9):
        cache.get_or_prepare(n, int)
        assert list(cache.PREPARED) == [*range(max(0, n - 2), n + 1)], "only the oldest goes"


@pytest.mark.parametrize("N_q", (20, 1))
def test_cache_keeps_no_tensor_alive(N_q):
    q, k, v, dO = random_inputs(2, 4, 2, N_q, 24, 16)
    lengths = torch.tensor([3, 24], device=DEVICE)
    O = attention(q, k, v, causal=True, key_lengths=lengths)
    O.backward(dO)
    assert cache.PREPARED and cache.CHECKED
    assert not any(vars(x) for x in (q, k, v, dO, lengths, O))
    alive = [weakref.ref(x) for x in (q, k, v, dO, lengths, O)]
    del q, k, v, dO, lengths, O
    gc.collect()
    assert not any(x() is not None for x in alive) and not cache.CHECKED


@pytest.mark.parametrize("scale", (0.5, -0.5))
def test_cached_paged_call_accepts_other_tensors_and_keeps_none_alive(scale):
    for _ in range(2):
        q, k, v, sinks = (torch.randn(shape, device=DEVICE) for shape in ((2, 4, 1, 16), *2 * ((6, 4, 2, 16),), (4,)))
        table, lengths = torch.randint(6, (2, 3), device=DEVICE), torch.randint(1, 13, (2,), device=DEVICE)
        given = q, k, v, table, lengths
        O, truth = (attention_paged(*given, sinks=sinks, scale=scale, backend=b) for b in ("auto", "reference"))
        assert largest_error(O, truth.double()) < 1e-5
        alive = [weakref.ref(x) for x in (*given, sinks, O)]
        del q, k, v, sinks, table, lengths, given, O, truth
        gc.collect()
        assert cache.PREPARED and not any(x() is not None for x in alive)


TENSOR_CHANGES = dict(
    shape=lambda x: x[:1],
    dtype=lambda x: x.to(torch.int8),
    strides=lambda x: x.repeat_interleave(2, -1)[..., ::2],
    device=lambda x: x.to("meta"),  # what was prepared for one GPU, such as the number of its SMs, serves no other
)


@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_kernel_cache_key_includes_every_tensor_property_and_option(direction, monkeypatch):
    keys, (q, k, v) = [], qkv()
    monkeypatch.setattr(dispatch, "get_or_prepare", lambda key, make, *given: keys.append(key) or (lambda *given: None))
    starts = torch.tensor([0, 3, 12], dtype=torch.int32, device=DEVICE)
    tensors = dict(q=q, k=k, v=v, key_lengths=starts[1:], sinks=q[0, :, 0, 0], cu_seqlens_q=starts, cu_seqlens_k=starts)
    gradients = dict(dO=q.clone(), dL=q[..., 0], O=q.clone(), L=q[..., 0]) if direction == "backward" else {}

    def call(options=Options(False, 1.0), **change):  # noqa: B008
        more = {name: change.pop(name, x) for name, x in gradients.items()}
        getattr(dispatch, direction)(*more.values(), Tensors(**tensors | change), options)

    call()
    for name, x in (tensors | gradients).items():
        if name != "L":
            for change in TENSOR_CHANGES.values():
                call(**{name: change(x)})
    changed_options = dict(causal=True, scale=2.0, dropout_p=0.1, left=3, right=3, softcap=1.0, exclude_hopper=True)
    for option in changed_options.items():
        call(options=Options(False, 1.0)._replace(**dict([option])))
    for name in ("key_lengths", "sinks", "cu_seqlens_q", "cu_seqlens_k", *(["dL"] if gradients else [])):
        call(**{name: None})
    if direction == "backward":
        torch.use_deterministic_algorithms(True)
        call()
        torch.use_deterministic_algorithms(False)
    assert len(keys) == len(set(keys)) > 38


TENSOR_ARGUMENTS = {*Tensors._fields, "k_pages", "v_pages", "max_seqlen_q"}  # of which dominant_sequence is made


@pytest.mark.parametrize("call", (attention, attention_packed, attention_paged))
def test_call_cache_key_includes_every_option(call):
    assert signature(call).parameters.keys() - TENSOR_ARGUMENTS <= {*GivenOptions._fields}
    base = GivenOptions(*range(len(GivenOptions._fields)))._replace(window=None, bias=None)
    variants = [base, base._replace(window=(1, 2)), base._replace(window=(1, 2.0)), base._replace(bias=abs)]
    for name in {*GivenOptions._fields} - {"window", "bias"}:
        variants += [
            base._replace(**{name: "another"}),
            base._replace(**{name: float(getattr(base, name))}),
        ]  # 1.0 == 1
    keys = [find_prepared(Tensors(*qkv()), variant)[0] for variant in variants]
    assert len(keys) == len(set(keys)) and None not in keys


def test_given_options_fills_each_field_from_its_argument():
    fields = {name: name for name in GivenOptions._fields}
    assert GivenOptions(*given_options(**fields))._asdict() == fields


# Values that were looked at -----------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch):
    """Return a list that gets an entry each time a tensor's values are read by torch.aminmax."""
    values_read, real = [], torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda x: values_read.append(1) or real(x))
    return values_read


def test_key_lengths_are_checked_once_per_version_and_key_count(reads):
    q, k, v = qkv()
    lengths = torch.tensor([3, 20], device=DEVICE)
    for _ in range(3):
        attention(q, k, v, key_lengths=lengths)
    assert len(reads) == 1
    with pytest.raises(ValueError, match="key_lengths: got values from 3 to 20; it takes 0 to N_k = 19"):
        attention(q, k[:, :, :19], v[:, :, :19], key_lengths=lengths)
    lengths[0] = 25
    with pytest.raises(ValueError, match="key_lengths: got values from 20 to 25"):
        attention(q, k, v, key_lengths=lengths)
    lengths[0] = 24
    attention(q, k, v, key_lengths=lengths)
    before = len(reads)
    lengths.data = torch.tensor([3, 77], device=DEVICE)  # no new version
    with pytest.raises(ValueError, match="key_lengths: got values from 3 to 77"):
        attention(q, k, v, key_lengths=lengths)
    cache.clear_caches()
    lengths.data = torch.tensor([3, 20], device=DEVICE)
    attention(q, k, v, key_lengths=lengths)
    assert len(reads) == before + 2


def test_key_lengths_at_a_reused_address_are_checked_again():
    q, k, v = qkv()
    for n in range(50):
        lengths = torch.tensor([n, 24], device=DEVICE)
        if n <= 24:
            attention(q, k, v, key_lengths=lengths)
        else:
            with pytest.raises(ValueError, match="key_lengths"):
                attention(q, k, v, key_lengths=lengths)


@pytest.mark.parametrize("seen", (False, True), ids=("never seen", "seen"))
def test_inference_mode_key_lengths_are_checked_each_time(seen, reads):
    q, k, v = qkv()
    if seen:
        attention(q, k, v, key_lengths=torch.tensor([3, 12], device=DEVICE))
    before = len(reads)
    with torch.inference_mode():
        lengths = torch.tensor([3, 12], device=DEVICE)
        for _ in range(2):
            attention(q, k, v, key_lengths=lengths)
        lengths += 40
        with pytest.raises(ValueError, match="key_lengths"):
            attention(q, k, v, key_lengths=lengths)
    assert len(reads) == before + 3


def paged_call(pages=6, page_size=4, N_q=1, window=None, table=None, lengths=None):
    q = torch.zeros(2, 2, N_q, 16, device=DEVICE)
    cache = torch.zeros(pages, page_size, 1, 16, device=DEVICE)
    return attention_paged(q, cache, cache, table, lengths, window=window)


def test_block_table_is_checked_again_for_other_pages_or_lengths(reads):
    table = torch.tensor([[0, 5, 99], [4, 2, 99]], device=DEVICE)  # 99 is behind what the lengths need
    both = torch.tensor([8, 5, 12], device=DEVICE)
    lengths, others = both[:2], both[::2]  # in one place, as a new tensor that gets the memory of one that is gone
    for _ in range(3):
        paged_call(table=table, lengths=lengths)
    assert len(reads) == 2
    with pytest.raises(ValueError, match="block_table: got pages from 0 to 5; it takes 0 to 4, for 5 pages"):
        paged_call(pages=5, table=table, lengths=lengths)
    with pytest.raises(ValueError, match="block_table: got pages from 0 to 99"):  # smaller pages: the third is needed
        paged_call(page_size=3, table=table, lengths=lengths)
    with pytest.raises(ValueError, match="block_table: got pages from 0 to 99"):
        paged_call(table=table, lengths=others)
    paged_call(table=table, lengths=lengths)
    lengths[1] = 9
    with pytest.raises(ValueError, match="block_table: got pages from 0 to 99"):
        paged_call(table=table, lengths=lengths)
    lengths[1] = 5
    paged_call(table=table, lengths=lengths)
    table[0, 0] = 6
    with pytest.raises(ValueError, match="block_table: got pages from 0 to 6"):
        paged_call(table=table, lengths=lengths)


def test_block_table_is_checked_again_if_more_of_it_is_read():
    """Of 12 keys one query with 3 keys to the left sees the third page alone."""
    table, lengths = torch.tensor([[99, 99, 1], [99, 99, 2]], device=DEVICE), torch.tensor([12, 12], device=DEVICE)
    for more in (dict(N_q=6, window=(3, None)), dict(window=(4, None)), dict(), dict(N_q=6, window=(10, None))):
        for kind in (torch.int64, torch.uint8):  # 12 − 6 − 10 is below 0
            paged_call(window=(3, None), table=table, lengths=lengths.to(kind))
            with pytest.raises(ValueError, match=r"block_table: got pages from [01] to 99"):
                paged_call(**more, table=table, lengths=lengths.to(kind))


def test_backend_portable_excludes_hopper_kernels(monkeypatch):
    """Whoever chooses is told so, forward and backward, in recorded calls, too; and of one long sequence."""
    recorded, starts = [], 2 * [torch.tensor([0, 40], dtype=torch.int32, device=DEVICE)]
    monkeypatch.setattr(
        dispatch, "hopper_supports", lambda _, options: recorded.append((options.exclude_hopper, options.in_custom_op))
    )
    for backend, portable in (("portable", True), ("triton", False), ("auto", False)):
        dense = [torch.randn(1, 2, 40, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
        packed = [*(x.detach()[0].transpose(0, 1).requires_grad_() for x in dense), *starts]
        for call, given in ((attention, dense), (attention_packed, packed)):
            call(*given, backend=backend).sum().backward()
            assert recorded == [(portable, False), (portable, False)]
            cache.clear_caches()
            torch.compile(call, backend="eager")(*given, backend=backend)
            assert recorded[2:] == [(portable, True)]
            recorded.clear()
    monkeypatch.setattr(dispatch, "hopper_supports", lambda _, options: recorded.append(options.dominant_sequence))
    starts = torch.tensor([0, 30, 40], dtype=torch.int32, device=DEVICE)
    for longest in (None, 30):
        attention_packed(*packed[:3], starts, starts, max_seqlen_q=longest)
    assert recorded == [False, True]
