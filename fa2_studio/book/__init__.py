"""The book: its chapters, the code that runs and records them, and the code that builds the offline site."""
