"""The FlashAttention-2 backward for Hopper, in which TMA accumulates dQ in HBM."""
