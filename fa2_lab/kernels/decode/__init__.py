"""Attention from a few queries to a long KV cache. shares.py divides the keys, and plan.py launches the kernels."""
