"""What of a model family works here, found out by training a tiny model of the same configuration beside itself."""
