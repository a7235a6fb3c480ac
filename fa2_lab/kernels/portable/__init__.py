"""The kernels for every GPU: FlashAttention-2 in plain Triton, forward and backward."""
