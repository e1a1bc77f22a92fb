"""Turns samples into each rank's inputs: collation, sharding, image assignment."""
