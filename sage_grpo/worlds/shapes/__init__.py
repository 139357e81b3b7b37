"""The moving-shapes world: scenes and their renderer, the exact oracle, and the hand-written reward."""
