"""Kernels for Hopper (sm_90) alone, in Gluon: one warp copies, the others multiply, and nobody waits for long."""

from fa2_lab.kernels import triton_versions

triton_versions.newest_names()  # before anybody imports Gluon
