"""Training of vision-language models, each part with its own parallelism."""
