"""A record as a sample: chat template, tokens, labels, pictures, audio."""
