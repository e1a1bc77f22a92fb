"""Where a chain of units is cut into the stages of a pipeline."""
