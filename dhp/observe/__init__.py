"""What a run reports: metrics, progress, loggers, trace, summary and the closing table. Nothing here steers a run."""
