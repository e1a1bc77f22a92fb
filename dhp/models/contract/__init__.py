"""Finds properties of families without code by small twins."""
