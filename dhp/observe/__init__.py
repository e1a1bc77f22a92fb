"""What a run tells: metrics, summary, progress and the closing table. Nothing here steers a run."""
