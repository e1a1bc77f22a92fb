"""What a run tells: metrics, progress, loggers, trace, summary and the closing table. Nothing here steers a run."""
