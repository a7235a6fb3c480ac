"""The public functions: which arguments they reject, and how torch sees the kernels behind them."""
