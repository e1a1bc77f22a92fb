"""Makes samples of records: chat template, tokens, labels, pictures, audio."""
