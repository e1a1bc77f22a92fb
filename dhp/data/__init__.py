"""Turns annotation files into a step's tokens and pixels."""
