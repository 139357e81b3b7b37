"""The run folder: written during training, read back by tools."""
