"""Backbones: the interface, sampling, LoRA, weights, and a folder for each model."""
