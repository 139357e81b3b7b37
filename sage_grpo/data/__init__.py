"""Requests for clips: the only data of a GRPO run."""
