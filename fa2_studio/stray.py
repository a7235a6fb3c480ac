"""A stray write: a kernel that writes past the end of its tensor. The following command makes the tool report it:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --print-limit 1 --show-backtrace no \\
        python -m fa2_studio.stray

figures/data/stray.txt contains the output of this command on an H200.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def stray_kernel(X):
    """Write 4,096 zeros to X, even if X is smaller."""
    tl.store(X + tl.arange(0, 4096), 0.0)


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}, Triton {triton.__version__}")
    stray_kernel[(1,)](torch.zeros(1000, device="cuda"))
    torch.cuda.synchronize()
