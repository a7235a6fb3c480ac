"""Gluon kernels for Hopper GPUs (sm_90), in which one warp prefetches tiles while all other warps compute."""

from fa2_lab.kernels import triton_versions

triton_versions.add_newest_names()  # this call must precede the first import of Gluon
