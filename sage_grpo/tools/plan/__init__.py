"""Estimates a run's memory, time and checkpoints before it starts."""
