"""VideoAlign, the reward that was learned from people's comparisons of clips."""
