"""Readers of annotation files, a module for each kind: a length, and any entry by its index."""
