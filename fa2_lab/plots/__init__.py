"""Pictures, with one file per idea.

In each file, data() computes the numbers of the picture, and draw() returns (figure, alternative text).
"""
