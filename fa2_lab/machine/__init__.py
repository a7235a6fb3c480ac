"""Models of attention on a GPU. They count bytes, operations, memory and waits, and you can check them by hand."""
