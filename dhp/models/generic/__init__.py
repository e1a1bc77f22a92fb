"""Families without code of their own: what transformers' contract, a configuration and a small model tell of them."""
