"""Attention from a few queries to a long KV cache. split_rules.py divides the keys; plan.py launches the kernels."""
