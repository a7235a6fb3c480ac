"""Kernels for Hopper GPUs (sm_90) only, in Gluon: one warp copies tiles ahead of time, and all other warps compute."""

from fa2_lab.kernels import triton_versions

triton_versions.add_newest_names()  # before Gluon is imported
