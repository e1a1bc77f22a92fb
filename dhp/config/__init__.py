"""The configuration of a run: its schema, how YAML and the command line are read, and the checks."""
