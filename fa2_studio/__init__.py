"""What only a checkout needs: the benchmark suites, the book and its site, the course, and other projects' tests."""
