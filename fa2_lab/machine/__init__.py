"""Models that count the bytes, operations, memory and waits of attention on a GPU, and that you can check by hand."""
