"""Wan 2.1 text-to-video, from a folder in the layout of diffusers."""
