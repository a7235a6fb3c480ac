"""What reading alone costs: a kernel that looks at every byte once and keeps nothing, the floor of all that reads."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

BLOCK = 4096  # numbers for a program: many small programs, of which the next goes to whoever is done
RARE = tl.constexpr(0x5EED)


@triton.jit
def read_kernel(X, found, n, BLOCK: tl.constexpr):
    """One block of X; a bit pattern that is next to never seen keeps the compiler from leaving the loads out."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < n, other=0)
    if tl.xor_sum(x, 0) == RARE:
        tl.store(found, 1)


def reading(X: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A call that reads all of X, whose bytes are a multiple of four."""
    numbers, found = X.view(-1).view(torch.int32), torch.zeros(1, dtype=torch.int32, device=X.device)

    def call() -> torch.Tensor:
        read_kernel[(triton.cdiv(numbers.numel(), BLOCK),)](numbers, found, numbers.numel(), BLOCK)
        return found

    return call
