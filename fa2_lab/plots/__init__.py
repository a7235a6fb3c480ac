"""Modules that each draw a picture of the book, and four modules that they share: style, show, live and idea_gains.

In a picture's module, data() computes the values to show, and draw() returns the figure and its alternative text.
"""
