"""What the forward and the backward on Hopper share: rings of tiles, mailboxes, the tile scheduler, launches."""
