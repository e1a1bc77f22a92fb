"""From annotation files on disk to the token ids and pixels of one training step; no torch, no Ray."""
