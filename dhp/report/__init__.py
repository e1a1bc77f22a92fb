"""A run as one page of HTML: what bounds it, where its time went, what it learned. Read from its directory alone."""
