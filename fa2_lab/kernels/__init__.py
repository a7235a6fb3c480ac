"""Attention in Triton and in Gluon.

When first imported, this package enables Triton's interpreter if there is no GPU, and it makes Triton fuse
multiplications and additions into FMAs, which the kernels require. Triton 3.9 still generates FMAs by default, but
warns that a later version will not.
"""

import os

from fa2_lab.kernels import interpreter

interpreter.enable_without_gpu()  # this call must precede the first import of Triton
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
