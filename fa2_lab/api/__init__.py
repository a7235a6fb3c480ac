"""The public calls: what they refuse, and how torch sees the kernels behind them."""
