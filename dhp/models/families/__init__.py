"""Families with code of their own: one file each."""
