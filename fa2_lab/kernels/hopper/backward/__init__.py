"""The FlashAttention-2 backward pass for Hopper, in which TMA accumulates dQ in HBM."""
