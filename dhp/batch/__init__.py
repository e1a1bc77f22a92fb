"""Samples as the inputs of each rank: collation, sharding, assignment of images."""
