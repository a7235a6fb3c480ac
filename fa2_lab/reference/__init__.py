"""The reference in NumPy and float64, with one file per stage: naive, online_softmax, fa1 and fa2.

heads.py runs a stage on a batch with several heads.
"""
