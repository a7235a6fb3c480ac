"""Models that count attention's bytes, operations, memory and waits on a GPU, simple enough to be checked by hand."""
