"""Attention of a few queries to a long cache. shares.py divides the keys, plan.py launches the kernels of kernel.py."""
