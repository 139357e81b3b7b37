"""Wan 2.1 text-to-video and Wan 2.2 TI2V, from a folder in the layout of diffusers."""
