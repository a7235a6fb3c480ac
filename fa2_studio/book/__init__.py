"""The book: its chapters, how they are run and recorded, and how they become an offline site."""
