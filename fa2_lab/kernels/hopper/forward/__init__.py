"""FlashAttention-2 forward on Hopper."""
