"""The contestants' own calls; contestants.py says who they are."""
