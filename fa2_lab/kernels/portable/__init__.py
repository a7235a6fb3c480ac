"""The portable FlashAttention-2 kernels, forward and backward, in plain Triton that runs on every GPU."""
