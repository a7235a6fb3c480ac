"""Prepare calls of many sizes, and print each launch's key in our cache and all that Triton's compiler would get.

No kernel is compiled or launched.
"""

import json
from types import SimpleNamespace

import torch
from biases import BIASES
from triton.runtime.jit import JITFunction

from fa2_lab.kernels import dispatch, launches
from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.cache import clear_caches
from fa2_lab.kernels.hopper.backward import launch as hopper_backward
from fa2_lab.kernels.hopper.forward import launch as hopper_forward
from fa2_lab.tools import offline

offline.compile_for("sm_90")
key_numbers, compiled_with = {}, []


def key_number(x) -> int:
    """Return a number for x that is the same for equal objects."""
    return key_numbers.setdefault(x, len(key_numbers))


def record_compilation(kernel, key, signature, device, constexprs, options, attrs, warmup):
    compiled_with.append(repr((signature, constexprs, options, attrs)))
    return SimpleNamespace(run=lambda *_: None, function=None, packed_metadata=None, launch_metadata=lambda *_: None)


def launch_and_print(self, *tensors):
    described = len(self.descriptors)
    arguments = *map(launches.descriptor_for, self.descriptors, tensors), *tensors[described:]
    compiled_with.clear()
    self.kernel.device_caches.clear()  # so that nothing counts as compiled already
    self.kernel[self.grid](*arguments, **self.arguments, **self.compiler_options)
    print(json.dumps([self.kernel.__name__, key_number(self.compile_key(tensors)), compiled_with[0]]))


JITFunction._do_compile, launches.Launch.__call__ = record_compilation, launch_and_print
hopper_forward.host.scheduler_counter = lambda X, in_custom_op: torch.zeros(2, dtype=torch.int32)
hopper_launches = dict(forward=hopper_forward, backward=hopper_backward)
for module in hopper_launches.values():
    module.is_fastest = lambda Q, K: True


def bf16_zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def make_calls(N: int, d: int = 64):
    """Make dense calls forward and backward, also with few queries, and packed calls with the same number of rows."""
    for N_q, heads, options in (
        (1, 8, Options(False, 0.1)),
        (N, 2, Options(True, 0.1)),
        (N, 1, Options(False, 0.3, left=9)),
        *((N, 1, Options(False, 0.3, bias=BIASES[name][0])) for name in ("alibi", "tree")),
    ):
        q, k, lengths = bf16_zeros(2, heads, N_q, d), bf16_zeros(2, 1, N, d), torch.zeros(2, dtype=torch.int32)
        for more in (dict(), dict(key_lengths=lengths), dict(key_lengths=lengths.long())):
            tensors = Tensors(q, k, k, **more)
            dispatch.forward(tensors, options)
            dispatch.backward(q.clone(), None, q, bf16_zeros(2, heads, N_q, dtype=torch.float32), tensors, options)
    starts = torch.zeros(N + 1, dtype=torch.int32)
    rows = bf16_zeros(N, 2, d)
    packed = Tensors(rows, rows, rows, cu_seqlens_q=starts, cu_seqlens_k=starts)
    dispatch.forward(packed, Options(True, 0.1))
    dispatch.backward(rows, None, rows, bf16_zeros(2, N, dtype=torch.float32), packed, Options(True, 0.1))


for find in (dispatch.hopper_module, lambda direction, device: hopper_launches[direction]):
    dispatch.hopper_module = find
    for N in (1, 15, 16, 17, 64, 100, 128, 500, 512, 2048, 2049):
        clear_caches()
        make_calls(N)
    make_calls(128, d=48)
