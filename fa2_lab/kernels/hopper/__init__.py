"""Kernels for Hopper (sm_90) alone, in Gluon: one warp copies, the others multiply, and nobody waits for long."""
