"""One rank of a stage: forward, backward, optimizer step, evaluation, generation."""
