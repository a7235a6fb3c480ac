"""Modules that draw the book's pictures, one per idea, and the modules they share: style, show, live and idea_gains.

In a picture's module, data() computes the values to show, and draw() returns the figure and its alternative text.
"""
