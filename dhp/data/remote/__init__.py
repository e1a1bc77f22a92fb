"""Reads files behind addresses through a local cache."""
