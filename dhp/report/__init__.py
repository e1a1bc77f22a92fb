"""Writes a run as one page of HTML."""
