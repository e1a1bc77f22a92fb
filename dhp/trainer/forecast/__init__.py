"""The search for a layout before a run: which there are, and what they would take."""
