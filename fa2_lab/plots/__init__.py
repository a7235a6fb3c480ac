"""The pictures, one file per idea, and the files that they share: style.py, show.py, live.py and idea_gains.py.

In each picture's file, data() computes what a picture shows, and draw() returns (figure, alternative text).
"""
