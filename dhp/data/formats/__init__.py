"""Formats of conversations, a module each: from a raw mapping to the turns of a Record."""
