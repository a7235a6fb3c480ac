"""Attention of a few queries over a long cache: kernel.py is the GPU's, shares.py cuts the keys, plan.py launches."""
