"""Families without code of their own: run by transformers' contract, a configuration and a small model."""
