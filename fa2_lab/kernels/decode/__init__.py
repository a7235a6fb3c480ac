"""Few queries over a long cache: split the keys among programs, then merge."""
