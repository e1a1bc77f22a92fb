"""Runs one rank of a stage: passes, update, evaluation, generation."""
