"""Worlds whose data manifold is known exactly."""
