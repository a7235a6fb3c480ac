"""Models of the machine: what attention moves, computes, holds and waits for, in numbers a reader can redo by hand."""
