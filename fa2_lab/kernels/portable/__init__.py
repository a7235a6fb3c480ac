"""The portable kernels, which run on every GPU: FlashAttention-2 in plain Triton, forward and backward."""
