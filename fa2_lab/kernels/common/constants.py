"""Constants shared by several kernels, as tl.constexpr, which Gluon kernels can also use."""

import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))  # the score of a masked key
LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = 2^(x · LOG2E)
LN2 = tl.constexpr(0.6931471805599453)  # ln(x) = log2(x) · LN2
FAR_ROW = tl.constexpr(2**30)  # more rows than any tensor has
