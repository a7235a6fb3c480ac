"""The portable FlashAttention-2 kernels, forward and backward, written in plain Triton to run on every GPU."""
