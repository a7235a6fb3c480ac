"""The calls of each implementation. The table of all implementations is in implementations.py."""
