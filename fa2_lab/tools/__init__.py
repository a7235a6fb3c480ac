"""What the `fa2-lab` command runs: the tour, the pictures, the ladder, xray."""
