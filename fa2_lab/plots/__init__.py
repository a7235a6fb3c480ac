"""The pictures, one file per idea.

In each file, data() computes what a picture shows, and draw() returns (figure, alternative text).
"""
