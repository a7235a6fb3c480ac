"""Models of attention on a GPU that count bytes, operations, memory and waits, and that you can check by hand."""
