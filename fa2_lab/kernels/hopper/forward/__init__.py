"""The FlashAttention-2 forward for Hopper: a persistent kernel with one producer warp and one to three consumers."""
