"""Pictures, one file per idea.

In each file, data() computes numbers, and draw() turns them into (figure, alternative text).
"""
