"""Kernels for Hopper (sm_90) only, in Gluon: one warp copies tiles ahead, and the others compute."""

from fa2_lab.kernels import triton_versions

triton_versions.newest_names()  # before Gluon is imported
