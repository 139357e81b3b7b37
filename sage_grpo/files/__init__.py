"""Files that may come from others, read without running code and written whole or not at all."""
