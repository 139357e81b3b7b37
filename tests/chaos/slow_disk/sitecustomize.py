"""In the processes of a chaos run: a disk that takes long to sync, while the file that SAGE_CHAOS_SLOW names exists.

Python imports this module at start, because its folder is on PYTHONPATH.
"""

import os
import time

SECONDS = 5.0  # for each sync: less than the run's collective_timeout, but a save has several
sync = os.fsync


def slow_sync(handle: int) -> None:
    if os.path.exists(os.environ.get("SAGE_CHAOS_SLOW", "")):
        time.sleep(SECONDS)
    sync(handle)


os.fsync = slow_sync
