"""What a run is told: the schema, how it is read from YAML and the command line, and what must hold."""
