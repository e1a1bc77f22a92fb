"""Where other libraries take dhp for a part of theirs: a file for each, which imports that library and is imported by
nothing else in dhp (docs/developers/seams.md)."""
