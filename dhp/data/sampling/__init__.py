"""The samples of each step: datasets, mixture, samplers, length tables."""
