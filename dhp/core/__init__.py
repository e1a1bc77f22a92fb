"""Values that cross processes, and small helpers of every room."""
