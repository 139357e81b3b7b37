"""The process that refreshes report.html during training."""

import subprocess
import sys
import time
from pathlib import Path

INTERVAL = 600.0  # seconds between two pages
PATIENCE = 60.0  # seconds to wait for a page that is being written


class PageProcess:
    """Writes the page of a run in a process of its own, which a Ctrl-C does not reach; training goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen | None = None
        self.started = time.monotonic()

    def refresh(self, module: str) -> None:
        """Start `python -m MODULE FOLDER` if the last page is older than INTERVAL."""
        if time.monotonic() - self.started <= INTERVAL:
            return
        self.finish()
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(self.folder)],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def finish(self) -> None:
        """Wait for the page that is being written, but not forever."""
        if self.process is None:
            return
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
