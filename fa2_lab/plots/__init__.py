"""Pictures, one file per idea. A figure function takes data and returns (figure, alt text); it computes nothing."""
