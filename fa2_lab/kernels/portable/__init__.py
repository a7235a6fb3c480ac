"""The product on every GPU: FlashAttention-2 in plain Triton, forward and backward."""
