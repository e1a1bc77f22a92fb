"""Pictures of any size as grids of patches: what families whose towers take patches in a row have in common."""
