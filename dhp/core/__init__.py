"""Values that cross processes, and small helpers that every room uses."""
