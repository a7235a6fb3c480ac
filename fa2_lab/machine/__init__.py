"""Models of the machine: the bytes, operations, memory and waits of attention, in numbers you can redo by hand."""
