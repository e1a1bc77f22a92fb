"""Reports a run: metrics, progress, loggers, trace, summary."""
