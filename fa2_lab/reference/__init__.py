"""The NumPy reference, which computes in float64 and has one file per stage: naive, online_softmax, fa1 and fa2.

heads.py runs a stage on a batch with several heads.
"""
