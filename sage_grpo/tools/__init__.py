"""Programs about runs and machines, each started as `python -m sage_grpo.tools.NAME`."""
