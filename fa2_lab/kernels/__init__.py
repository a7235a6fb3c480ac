"""Attention in Triton and in Gluon.

The first import of this package turns Triton's interpreter on if there is no GPU, and asks Triton for FMAs, on which
the kernels rely. FMAs are the default up to Triton 3.9, but 3.9 already warns that this will change.
"""

import os

from fa2_lab.kernels import interpreter

interpreter.enable_without_gpu()  # before Triton is imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
