"""Pictures of any size as grids of patches: common code of families whose towers take a sequence of patches."""
