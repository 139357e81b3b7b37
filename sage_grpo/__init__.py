"""SAGE-GRPO: GRPO post-training of video generators with manifold-aware exploration."""

from sage_grpo.environment import wait_passively

wait_passively()  # here, because every program imports the package before torch

__version__ = "0.1.0"
