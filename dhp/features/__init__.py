"""Features of pictures from a frozen tower, cached on disk: a file a picture, by a key of all that they depend on."""
