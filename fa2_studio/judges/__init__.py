"""Run other projects' tests on this package, with its functions in place of those that the tests import.

The tests are taken from the user's checkout of such a project, at a commit named in suites.py. None of their files is
part of this repository.
"""
