"""Requests for clips: the only data of a GRPO run."""

from sage_grpo.installed import require_packages

require_packages("PIL")
