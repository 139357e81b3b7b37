"""Flags: the table of all of them, what they must agree on, and how a command line and a YAML file give them."""
