"""The public calls, the checks of their arguments, and the operators through which torch sees the kernels."""
