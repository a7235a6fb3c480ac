"""FlashAttention-2 backward on Hopper."""
