"""Code that the Hopper forward and backward share: rings of tiles, mailboxes, the tile scheduler, and host code."""
