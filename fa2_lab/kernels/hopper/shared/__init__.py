"""Code shared by the Hopper forward and backward kernels: rings of tiles, mailboxes, the scheduler and host code."""
