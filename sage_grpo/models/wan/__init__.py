"""Wan 2.1 text-to-video, Wan 2.2 TI2V and A14B, from a folder in the layout of diffusers."""
