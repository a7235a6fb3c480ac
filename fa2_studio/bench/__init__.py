"""Measuring: how a GPU is timed, against whom, and how the answer is kept. `fa2-lab bench SUITE` runs a suite."""
