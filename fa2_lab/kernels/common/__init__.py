"""Code that the portable, decode and Hopper kernels share: constants, tiles, and the softmax step."""
