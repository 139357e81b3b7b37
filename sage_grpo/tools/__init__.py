"""Command-line tools for runs and machines, each started as `python -m sage_grpo.tools.NAME`."""
