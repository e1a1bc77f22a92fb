"""Starts a run's driver as a process of its own, and again after a fault. Imports neither Ray nor torch."""
