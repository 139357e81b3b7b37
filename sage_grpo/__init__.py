"""SAGE-GRPO: GRPO post-training of video generators with manifold-aware exploration."""

__version__ = "0.1.0"
