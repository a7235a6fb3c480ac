"""The public functions, their argument checks, and the registration of the kernels with torch."""
