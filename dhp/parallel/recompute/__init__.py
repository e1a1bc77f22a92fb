"""Activation checkpointing, offload, and their measurement."""
