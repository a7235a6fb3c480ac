"""Attention for Hopper from examples of other projects, which must be installed because this project has no copies."""

import torch

from fa2_studio.bench.peers.dense import Attend, function_of
from fa2_studio.bench.problem import Missing, Problem

KITTENS = "thunderkittens_mha"  # the name under which kernels/attention/mha_h100 is compiled
TLX = "triton.language.extra.tlx.tutorials.hopper_fa_ws_pipelined_pingpong_persistent"


def refuse_others(problem: Problem) -> None:
    """Raise Missing for a problem that these examples would compute wrongly, such as one with incomplete blocks."""
    if problem.mask("cpu"):
        raise Missing("it supports only the causal mask")
    if problem.N_q != problem.N_k or problem.N_q % 128 or problem.d not in (64, 128):
        raise Missing("it supports only d = 64 and d = 128, and N_q = N_k in whole blocks of 128")
    if problem.heads != problem.kv_heads:
        raise Missing("it does not support grouped heads")


class Kittens(torch.autograd.Function):
    """An autograd function that combines ThunderKittens' functions for the forward and backward passes."""

    @staticmethod
    def forward(ctx, q, k, v, causal):
        O, L = function_of(KITTENS, "mha_forward")(q, k, v, causal)
        ctx.save_for_backward(q, k, v, O, L)
        ctx.causal = causal
        return O

    @staticmethod
    def backward(ctx, dO):
        return *function_of(KITTENS, "mha_backward")(*ctx.saved_tensors, dO.contiguous(), ctx.causal), None


def thunder_kittens(problem: Problem) -> Attend:
    """Return ThunderKittens' attention for the H100."""
    function_of(KITTENS, "mha_forward")
    refuse_others(problem)
    return lambda q, k, v: Kittens.apply(q, k, v, problem.causal)


def tilelang(problem: Problem) -> Attend:
    """Return the attention of TileLang's examples/flash_attention, a folder that must be on the Python path.

    If gradients are needed, this is the example with a backward pass, and otherwise the tuned forward kernel.
    """
    build = function_of("example_mha_fwd_bhsd", "flashattn")
    with_gradients = function_of("example_mha_bwd_bhsd", "attention")
    refuse_others(problem)
    sizes = problem.batch, problem.heads, problem.N_q, problem.N_k, problem.d
    forward = build(*sizes, problem.causal, block_M=128, block_N=128, num_stages=2, threads=256)  # their own sizes
    return lambda q, k, v: with_gradients(q, k, v, problem.causal) if q.requires_grad else forward(q, k, v)


def tlx(problem: Problem) -> Attend:
    """Return the attention of TLX's Hopper tutorial, in which two consumers alternate.

    It requires a version of Triton that contains TLX.
    """
    function = function_of(TLX, "attention")
    refuse_others(problem)
    absent = Missing("its tutorial for Hopper has neither a causal mask nor a backward pass")
    if problem.causal:
        raise absent

    def call(q, k, v):
        if q.requires_grad:
            raise absent
        return function(q, k, v, problem.d**-0.5)

    return call
