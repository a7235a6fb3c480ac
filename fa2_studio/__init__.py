"""The parts that only a checkout needs: benchmark suites, the book and its site, the course, and third-party tests."""
