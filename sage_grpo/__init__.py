"""SAGE-GRPO: GRPO post-training of HunyuanVideo-1.5 with manifold-aware exploration."""

__version__ = "0.1.0"
