"""The workshop around the package: the book, the bench, the course, the pictures, the command line."""
