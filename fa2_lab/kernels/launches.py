"""Kernel launches with little host overhead, and the arguments that a launch needs in addition to its tensors."""

import functools
import math
from contextlib import nullcontext
from copy import copy
from itertools import chain
from typing import Any

import torch
import triton

from fa2_lab.kernels import interpreter, triton_versions
from fa2_lab.kernels.cache import PREPARED, keep_prepared
from fa2_lab.kernels.common.tile import DropoutRule
from fa2_lab.kernels.triton_versions import driver, relaunch, specialization_key
from fa2_lab.tiles import cdiv

triton_versions.check_and_patch()
MiB = 2**20

# Kernels are not specialized on these sizes, so Triton compiles one kernel for all of their values. N_q is not in the
# list, because kernels need fewer registers if the compiler knows that N_q is a multiple of 16. For example, without
# specialization on N_q, the causal forward kernel at d = 128 would spill 8 bytes per thread on Hopper. The price of
# this specialization is that Triton compiles up to three kernels: for N_q = 1, for multiples of 16, and for all other
# N_q.
UNSPECIALIZED = ["H", "group", "N_k", "batch_heads", "l2_group", "sequences"]

# With programmatic dependent launch, a kernel can start before the previous kernel ends, and wait for it later.
USE_PDL = dict(launch_pdl=True)

# Fuse multiplications and additions into FMAs. From Triton 3.10 on, the compiler fuses them only on request.
FP_FUSION = dict(enable_fp_fusion=True)


class Launch:
    """A kernel launch with its grid and all arguments except the tensors.

    All calls with the same key (see cache.py) share a Launch. Calling the Launch with tensors launches the kernel. The
    first tensors, one for each of `descriptors`, are passed to the kernel as tensor descriptors, and the other tensors
    are passed as pointers. All other arguments, which are strides, sizes and compile-time constants, are passed by
    name. `compiler_options` is passed to Triton's compiler.
    """

    def __init__(
        self, kernel: Any, grid: int | tuple, compiler_options: dict, descriptors: tuple = (), /, **arguments: Any
    ) -> None:
        if interpreter.is_enabled():
            interpreter.announce_once()
        self.kernel, self.compiler_options, self.arguments = kernel, compiler_options | FP_FUSION, arguments
        self.grid = grid if isinstance(grid, tuple) else (grid, 1, 1)
        self.descriptors = descriptors
        # The relauncher performs the second and all later launches. It is None if Triton's own call cannot be bypassed.
        self.relauncher: Any = None
        self.relauncher_is_final = False  # set to True by the first launch

    def __call__(self, *tensors: Any) -> None:
        """Launch the kernel on these tensors.

        The first launch uses Triton's own call, which compiles the kernel. Later launches bypass this call and take a
        third of its time. If Triton has already compiled the same kernel for other sizes, even the first launch
        bypasses the call.

        If a pointer is not 16-byte-aligned, Triton compiles a different kernel, so Triton's own call is always used.
        Kernels with descriptors are an exception because they never read 16 bytes at once through a pointer.
        """
        at = addresses(tensors)
        aligned = self.descriptors or math.gcd(16, *at) == 16
        n_descriptors = len(self.descriptors)
        if aligned and not self.relauncher_is_final and (known := PREPARED.get(self.compile_key(tensors))):
            rest = [self.arguments[name] for name in self.kernel.arg_names[len(tensors) :]]
            self.relauncher, self.relauncher_is_final = known.with_arguments(self.grid, self.descriptors, rest), True
        if aligned and self.relauncher and self.relauncher(current_stream(tensors[0]), at):
            return
        args = *map(descriptor_for, self.descriptors, tensors), *tensors[n_descriptors:]
        compiled = self.kernel[self.grid](*args, **self.arguments, **self.compiler_options)
        if aligned and not self.relauncher_is_final and isinstance(compiled, triton.compiler.CompiledKernel):
            all_args = *args, *(self.arguments[name] for name in compiled.src.fn.arg_names[len(args) :])
            stream, n_pointers = current_stream(tensors[0]), len(tensors) - n_descriptors
            self.relauncher = relaunch(compiled, self.grid, stream, all_args, n_descriptors, n_pointers)
            self.relauncher_is_final = True
            keep_prepared(self.compile_key(tensors), self.relauncher)

    def compile_key(self, tensors: Any) -> tuple:
        """Return all properties of a launch that affect the compiled kernel.

        Launches with equal keys share one compiled kernel.
        """
        if interpreter.is_enabled():
            return ()
        tensor_keys = [None if X is None else (X.dtype, X.device) for X in tensors]
        descriptor_keys = [(tuple(x.block_shape), x.layout) for x in self.descriptors]
        arguments_key = specialization_key(self.kernel, self.arguments)
        return self.kernel, *tensor_keys, *descriptor_keys, *self.compiler_options.items(), arguments_key


def descriptor_for(descriptor: Any, X: torch.Tensor) -> Any:
    """Return a copy of `descriptor` that describes X. Copying skips the constructor's checks."""
    described = copy(descriptor)
    described.base = X
    return described


def current_stream(X: torch.Tensor) -> int:
    """Return the handle of the current CUDA stream on X's device."""
    return driver.active.get_current_stream(X.get_device())


def addresses(tensors: Any) -> list[int]:
    """Return the address of each tensor, or 0 in place of a tensor that is None. Kernels never read from address 0."""
    return [0 if X is None else X.data_ptr() for X in tensors]


# A launch's other arguments -----------------------------------------------------------------------------------


def dense_shape(X: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of X as (batch, heads, N, d).

    Packed sequences of shape (tokens, heads, d) are treated as the rows of a single batch entry.
    """
    return X.shape if X.dim() == 4 else (1, X.shape[1], X.shape[0], X.shape[2])


def dense_strides(X: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of X for batch entries, heads and rows. The columns of X must be contiguous.

    For packed sequences, the row stride takes the place of the batch stride, because a kernel locates a sequence by its
    first row.
    """
    return X.stride()[:3] if X.dim() == 4 else (X.stride(0), X.stride(1), X.stride(0))


def all_strides(*tensors: torch.Tensor) -> tuple:
    """Return the tensors' strides, and whether the compiler must be told that they are all multiples of 8.

    The compiler loads eight 16-bit elements with one instruction only if it knows that every stride is a multiple of 8.
    On its own, it checks only whether a stride is a multiple of 16, which holds for d = 80 but not for d = 72.
    """
    strides_of_all = tuple(map(dense_strides, tensors))
    return strides_of_all, triton.language.constexpr(math.gcd(16, *chain(*strides_of_all)) == 8)


def program_count(X: torch.Tensor, B: int, sequences: int | None) -> int:
    """Return the number of programs that a launch needs if each program processes B rows of a head of X.

    For packed sequences, this number is an upper bound that also covers the rows after the last sequence.
    """
    batch, H, N, _ = dense_shape(X)
    return batch * H * (cdiv(N, B) if sequences is None else N // B + sequences + 1)


def size_arguments(
    Q: torch.Tensor, K: torch.Tensor, owned: torch.Tensor, streamed: torch.Tensor, sequences: int | None
) -> dict:
    """Return a kernel's size arguments.

    A program owns a block of the tensor `owned` and loops over blocks of the tensor `streamed`."""
    (_, H, N_q, _), (_, H_kv, N_k, _), (batch, heads, *_) = dense_shape(Q), dense_shape(K), dense_shape(owned)
    sizes = dict(H=H, group=H // H_kv, N_q=N_q, N_k=N_k, batch_heads=batch * heads, sequences=sequences)
    return sizes | dict(l2_group=min(batch * heads, l2_group(streamed)))


def window_bounds(options: Any) -> tuple:
    """Return the bounds (left, right) of the window around the diagonal. For the causal mask, right is 0.

    This 0 is a compile-time constant. All other bounds are runtime values.
    """
    return options.left, triton.language.constexpr(0) if options.causal else options.right


def l2_group(X: torch.Tensor) -> int:
    """Return the number of heads, at least 1, to process concurrently so that their rows fit in 8 MiB of L2.

    A head's size is doubled because the kernel reads two tensors of X's size (for example, K and V).
    """
    _, _, N, d = dense_shape(X)
    return max(1, 8 * MiB // (2 * max(1, N) * d * X.element_size()))


@functools.cache
def sm_count(device: torch.device) -> int:
    """Return the number of SMs of the GPU `device`, or 132 (as on an H100) if `device` is not a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def dropout_rule(p: float) -> DropoutRule:
    """Return the DropoutRule for a dropout probability of p."""
    return DropoutRule(math.floor(p * 2**32), 1 / (1 - p))


def on_device_of(Q: torch.Tensor) -> Any:
    """Return a context manager that makes Q's GPU the current device, as Triton requires during a launch."""
    if not Q.is_cuda:
        return interpreter.LOCK
    if Q.get_device() == torch.accelerator.current_device_index():
        return CURRENT_DEVICE
    return torch.cuda.device(Q.device)


CURRENT_DEVICE = nullcontext()
