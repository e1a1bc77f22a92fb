"""Kernels of norms, rotary positions and gates."""
