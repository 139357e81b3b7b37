"""Rewards: the interface, and one file or folder for each."""
