"""A CUDA that computes nothing, under torch's own build for CUDA."""
