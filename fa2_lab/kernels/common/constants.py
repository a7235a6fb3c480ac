"""Constants shared by several kernels. They are of type tl.constexpr, so Gluon kernels can use them as well."""

import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))  # the score of a masked key
LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = 2^(x · LOG2E)
LN2 = tl.constexpr(0.6931471805599453)  # ln(x) = log2(x) · LN2
FAR_ROW = tl.constexpr(2**30)  # a row index beyond the end of any tensor
