"""Optimizers: replicated, ZeRO, FSDP2, frozen; gradients in buckets."""
