"""Files of annotations, in any known format, as records."""
