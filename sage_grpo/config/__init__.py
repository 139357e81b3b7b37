"""Flags: the table of all of them, what they must agree on, and how a command line and a YAML file give them."""

from sage_grpo.installed import require_packages

# for reading flags, which launchers do on machines that need not train; programs ask for the rest before they use it
require_packages("yaml")
