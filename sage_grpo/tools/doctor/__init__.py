"""Checks a configuration before it costs GPU hours."""
