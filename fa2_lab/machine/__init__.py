"""Models of the machine: what attention moves, computes, stores and waits for, in numbers you can redo by hand."""
