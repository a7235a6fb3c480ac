"""figures/: every picture, the data behind it and where it is used. `fa2-lab figures` rebuilds them all.

Pictures are drawn from data that somebody hands them; the files of this room do the handing, one for each part of the
house that the data comes from.
"""
