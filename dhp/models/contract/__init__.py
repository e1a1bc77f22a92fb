"""Families without code of their own: their properties, found by running a small twin."""
