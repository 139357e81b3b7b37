"""Prompts in, nothing else: a GRPO run has no other data."""
