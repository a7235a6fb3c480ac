"""Models of attention on a GPU, which count bytes, operations, memory and waits, and can be checked by hand."""
