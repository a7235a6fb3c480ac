"""The backward of FlashAttention-2 for Hopper, which adds to dQ in HBM by TMA."""
