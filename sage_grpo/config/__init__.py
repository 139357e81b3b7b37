"""Flags: their table, the rules between them, and how they are read from a command line and a YAML file."""

from sage_grpo.installed import require_packages

# all that reading flags needs, also on machines that only launch; programs check the other packages before use
require_packages("yaml")
