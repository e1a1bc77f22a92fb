"""How fast a reader process makes samples of conversations, pictures and videos."""
