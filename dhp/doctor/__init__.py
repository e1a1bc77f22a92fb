"""Examines a model family by training a tiny model of the same configuration, whole and in parts."""
