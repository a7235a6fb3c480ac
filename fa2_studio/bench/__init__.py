"""Benchmarks: suites that time our kernels and other implementations on a GPU and record the results.

`fa2-lab bench SUITE` runs a suite.
"""
