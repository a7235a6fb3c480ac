"""FlashAttention-2 in Triton: forward.py is Algorithm 1, backward.py Algorithm 2, launch.py picks the block sizes."""
