"""Public calls on drawn shapes, strides, dtypes, lengths and gradients, held to float64; without a GPU interpreted."""

from types import SimpleNamespace

import pytest
import torch
from biases import BIASES
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from kernel_truth import ALLOWED_RATIO, DEVICE, RESULTS, dense_truth, dense_truth_for, largest_error, with_gaps

from fa2_lab.api.attention import attention
from fa2_lab.kernels import interpreter

if interpreter.version_conflict():
    pytest.skip(interpreter.version_conflict(), allow_module_level=True)

FEW, MANY, MAX_LENGTH = (50, 2000, 200) if DEVICE == "cuda" else (12, 150, 24)  # a GPU compiles kernels for each
SETTINGS = dict(
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
few_or_many = pytest.mark.parametrize(
    "examples", [FEW, pytest.param(MANY, marks=pytest.mark.exhaustive)], ids=["few", "many"]
)


def nan_past_the_end(x):
    """Return a copy of x with NaN in the memory behind its last number."""
    long = torch.full((x.numel() + 64 * x.shape[3],), torch.nan, dtype=x.dtype, device=x.device)
    long[: x.numel()] = x.flatten()
    return long[: x.numel()].view(x.shape)


LAYOUTS = dict(  # how somebody might hold a tensor; what lies between its numbers and behind them is NaN
    plain=lambda x: x,
    heads_inside=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    rows_apart=lambda x: with_gaps(x, 2),
    numbers_apart=lambda x: with_gaps(x, 3),
    turned=lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    one_head_for_all=lambda x: x[:, :1].expand(x.shape),
    behind=nan_past_the_end,
)

sides = st.none() | st.integers(0, MAX_LENGTH)
one_or_two, row_counts, layouts = st.integers(1, 2), st.integers(1, MAX_LENGTH), st.sampled_from(list(LAYOUTS))
CASE = dict(
    batch=one_or_two,
    kv_heads=one_or_two,
    group=one_or_two,
    N_q=row_counts,
    N_k=row_counts,
    d=st.sampled_from([16, 24, 64]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    size=st.sampled_from([1.0, 5.0]),
    layouts=st.tuples(layouts, layouts, layouts, layouts),
    causal=st.booleans(),
    shorter=st.none() | st.tuples(st.integers(0, MAX_LENGTH), st.integers(0, MAX_LENGTH)),  # than N_k, each sequence
    p=st.sampled_from([0.0, 0.3]),
    window=st.none() | st.tuples(sides, sides),
    softcap=st.sampled_from([None, 1.5]),
    sink=st.booleans(),
    bias=st.none() | st.sampled_from(list(BIASES)),
    seed=st.integers(0, 2**64 - 1),
)
# Large scores and short rows: here that D is made from O as it was rounded counts for more than all else.
ROUNDING_CASE = dict(batch=1, kv_heads=2, group=1, N_q=17, N_k=7, d=16, dtype=torch.bfloat16, size=5.0)
ROUNDING_CASE |= dict(layouts=("plain",) * 4, causal=True, shorter=None, p=0.0)
ROUNDING_CASE |= dict(window=None, softcap=None, sink=False, bias=None)
# Two keys with a bias of 10⁴ in each row: here a relative error that L has in all rows counts for more than all else.
BIAS_CASE = ROUNDING_CASE | dict(N_q=194, N_k=129, d=64, dtype=torch.float32, bias="two_keys")
cases = st.fixed_dictionaries(CASE)


def make_call(case):
    """Return [q, k, v, dO] and the options of a drawn case."""
    case = SimpleNamespace(**case)
    generator, lengths = torch.Generator().manual_seed(case.seed % 2**32), None
    q_shape, k_shape = (case.batch, case.kv_heads * case.group, case.N_q), (case.batch, case.kv_heads, case.N_k)
    tensors = [
        torch.randn(*shape, case.d, generator=generator).to(DEVICE, case.dtype)
        for shape in (q_shape, k_shape, k_shape, q_shape)
    ]
    tensors[0] = case.size * tensors[0]
    if case.shorter:
        lengths = torch.tensor([max(0, case.N_k - n) for n in case.shorter[: case.batch]], device=DEVICE)
    sinks = torch.randn(q_shape[1], generator=generator).to(DEVICE) if case.sink else None
    options = dict(causal=case.causal, window=case.window, softcap=case.softcap, sinks=sinks)
    options |= dict(lengths=lengths, p=case.p, seed=case.seed, bias=BIASES.get(case.bias))
    return [LAYOUTS[layout](x) for x, layout in zip(tensors, case.layouts, strict=True)], options


def filled_padding(k, v, lengths, filling):
    """Return k and v whose padding, which no kernel may use, is filled with a value."""
    if lengths is None:
        return k, v
    hidden = (torch.arange(k.shape[2], device=k.device)[None, :] >= lengths[:, None])[:, None, :, None]
    return k.masked_fill(hidden, filling), v.masked_fill(hidden, filling)


def check_results(got, tensors, **options):
    """Assert that each result that is not None keeps to the accuracy rule, plus one ulp."""
    q, k, v, dO = (x.detach().contiguous() for x in tensors)
    options["bias"] = options["bias"] and options["bias"][1]
    truth, torchs = dense_truth_for(got[0], q, k, v, dO, **options), dense_truth(q, k, v, dO, dtype=q.dtype, **options)
    digits = 2.0**-22 * truth[1].nan_to_num(0, 0, 0).abs().max().item()  # the digits of P that L in fp32 costs
    for name, a, t, b in zip(RESULTS, got, truth[:5], torchs[:5], strict=True):
        if a is not None:
            rounding = max(1e-5, torch.finfo(q.dtype).eps, digits) * max(1.0, t.nan_to_num(0, 0, 0).abs().max().item())
            assert largest_error(a, t) <= ALLOWED_RATIO[name] * largest_error(b, t) + rounding, (
                f"{name}: {largest_error(a, t)}, torch {largest_error(b, t)}"
            )


def run_call(q, k, v, dO, requires_grad, options):
    """Return O, L, and the gradients of q, k and v, with None for those that are not wanted."""
    leaves = [x.detach().requires_grad_(wanted) for x, wanted in zip((q, k, v), requires_grad, strict=True)]
    names = dict(lengths="key_lengths", p="dropout_p")
    options = options | dict(bias=options["bias"] and options["bias"][0])
    O, L = attention(*leaves, return_lse=True, **{names.get(name, name): x for name, x in options.items()})
    differentiated = [x for x, wanted in zip(leaves, requires_grad, strict=True) if wanted]
    gradients = iter(torch.autograd.grad(O, differentiated, dO) if differentiated else ())
    return O, L, *(next(gradients) if wanted else None for wanted in requires_grad)


@few_or_many
def test_attention_matches_float64_for_generated_calls(examples):
    wanted = st.tuples(st.booleans(), st.booleans(), st.booleans())

    @settings(max_examples=examples, derandomize=examples == FEW, **SETTINGS)
    @given(cases, wanted, st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    @example(ROUNDING_CASE | dict(seed=1), (True, True, True), torch.nan)
    @example(ROUNDING_CASE | dict(seed=49), (True, True, True), torch.nan)
    @example(BIAS_CASE | dict(seed=1), (True, True, True), torch.nan)
    def fuzz(call, wanted, filling):
        (q, k, v, dO), options = make_call(call)
        dirty = filled_padding(k, v, options["lengths"], filling)
        check_results(run_call(q, *dirty, dO, wanted, options), (q, k, v, dO), **options)

    fuzz()
