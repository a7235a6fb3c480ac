"""Models of attention on a GPU, simple enough to check by hand, that count bytes, operations, memory and waits."""
