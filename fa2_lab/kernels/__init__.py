"""Attention in Triton and in Gluon.

The first import of this package decides whether Triton's interpreter runs the kernels.
"""

from fa2_lab.kernels import interpreter

interpreter.enable_without_gpu()  # before anybody imports Triton
