"""Code that the portable, decode and Hopper kernels share: numbers, tiles, and the softmax step."""
