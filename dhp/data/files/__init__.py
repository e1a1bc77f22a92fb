"""One file for each kind of annotation file: a length, and any entry by its index."""
