"""One page about a run, or about several."""
