"""What the portable kernels, decode and Hopper's own share: numbers, tiles, and the softmax step."""
