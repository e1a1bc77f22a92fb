"""Weights & Biases, MLflow and SwanLab, where they are installed and asked for: each in a process of its own, so that
none of them can stop or slow a run."""
