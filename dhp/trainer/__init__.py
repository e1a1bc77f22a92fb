"""The driver: preflight, session, training loop, evaluation, curriculum, export."""
