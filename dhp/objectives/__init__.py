"""Objectives: what a step minimizes, and the seam for more."""
