"""The calls: what they check, and how torch sees the kernels behind them."""
