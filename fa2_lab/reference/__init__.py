"""The ladder in NumPy float64, one file per stage: naive, online_softmax, fa1, fa2. heads.py runs them on a batch."""
