"""Attention in Triton and in Gluon.

The first import of this package enables Triton's interpreter if there is no GPU. It also makes Triton fuse
multiplications and additions into FMAs, as the kernels require. Triton 3.9 still does so by default, but warns that a
later version will not.
"""

import os

from fa2_lab.kernels import interpreter

interpreter.enable_without_gpu()  # this call must precede the first import of Triton
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
