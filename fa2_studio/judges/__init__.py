"""Other projects' tests, run on this package: it stands behind the names that they import.

Their files are taken from a checkout that the user has, at a commit that is named here; none of them lies here.
"""
