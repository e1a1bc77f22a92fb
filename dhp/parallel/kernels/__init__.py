"""Kernels of layers other than attention: norms, rotary positions and gates in few passes over memory."""
