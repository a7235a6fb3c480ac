"""Attention in Triton and in Gluon. Importing anything of it settles first whether Triton's interpreter runs it."""

from fa2_lab.kernels import interpreter

interpreter.decide()  # before anybody imports Triton
