"""Run other projects' tests on this package, whose functions replace the functions that these tests import.

The tests are taken from the user's checkout of that project, at a commit that suites.py names. None of their files is
part of this repository.
"""
