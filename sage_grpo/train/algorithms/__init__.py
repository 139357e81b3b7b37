"""Algorithms: how clips are sampled, which log-probability they have, and what is minimized."""
