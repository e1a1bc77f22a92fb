"""Supervises a run's driver; imports neither Ray nor torch."""
