"""A small VideoAlign that learns to judge the moving-shapes world from pairs of clips, as the published one did."""
