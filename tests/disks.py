"""Disks that are really full."""

import shutil
import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def small_disk(place, megabytes):
    """A real file system of that size; skipped where mounting is not permitted."""
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(file, leave=0):
    """Write a file as large as its disk has room for, but for some bytes."""
    file.write_bytes(bytes(shutil.disk_usage(file.parent).free - leave))
