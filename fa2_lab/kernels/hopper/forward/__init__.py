"""The forward of FlashAttention-2 for Hopper, a persistent kernel with one producer warp and up to three consumers."""
