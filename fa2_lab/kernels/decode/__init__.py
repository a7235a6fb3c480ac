"""Attention of a few queries over a long cache: shares.py cuts the keys, plan.py launches, kernel.py computes."""
