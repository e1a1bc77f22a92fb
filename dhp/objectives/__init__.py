"""What a step minimizes: the seam for objectives, and those that there are."""
