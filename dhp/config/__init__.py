"""A run's configuration: schema, reading, checks."""
