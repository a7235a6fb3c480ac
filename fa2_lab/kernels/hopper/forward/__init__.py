"""The FlashAttention-2 forward pass for Hopper: a persistent kernel with a producer and one to three consumers."""
