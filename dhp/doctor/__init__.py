"""Examines a model family by training a tiny one."""
