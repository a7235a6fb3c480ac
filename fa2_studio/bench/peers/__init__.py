"""The calls of each implementation. implementations.py contains the table of all implementations."""
