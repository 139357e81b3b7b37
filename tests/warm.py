"""What a process finds out in its first run: ranks are forked from a server that knows it already."""

import gc

from sage_grpo.runs.card import compiled_template
from sage_grpo.train.fingerprints import versions

versions()
compiled_template()

# or the first garbage collection of each rank copies the memory that it shares with the server
gc.collect()
gc.freeze()
