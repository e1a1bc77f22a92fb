"""Training steps by operations, bytes and host time, held against step times that others published."""
