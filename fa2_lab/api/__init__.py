"""The public functions, the checks of their arguments, and the code that registers the kernels with torch."""
