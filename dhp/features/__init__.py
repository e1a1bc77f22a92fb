"""What a frozen tower makes of pictures, kept on disk: a file a picture, by a key of all that decides it."""
