"""The embedded default: a tiny model, generated pictures and needles."""
