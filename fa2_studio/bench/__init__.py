"""Benchmarks: suites that time our kernels and other implementations on a GPU and keep records.

`fa2-lab bench SUITE` runs a suite.
"""
