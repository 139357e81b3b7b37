"""In the processes of a chaos run: a machine with a slow disk, a wrong clock, or files that cannot be written.

Python imports this module at start, because its folder is on PYTHONPATH. SAGE_CHAOS is a path; while one of these files
exists, the machine has that fault:

    PATH.slow     each sync takes SECONDS
    PATH.clock    time.time() is wrong by the seconds in the file
    PATH.denied   opening a file to write, or making a folder, fails: "ERRNO TEXT", for paths that contain TEXT
"""

import io
import os
import time

SECONDS = 5.0  # for each sync: less than the run's collective_timeout, but a save has several
FAULTS = os.environ.get("SAGE_CHAOS", "")

sync = os.fsync
clock = time.time
open_file = io.open
make_folder = os.mkdir


def content(suffix):
    """What the file of a fault holds; None while the machine does not have that fault."""
    if not FAULTS:
        return None
    try:
        with open_file(FAULTS + suffix) as file:
            return file.read()
    except OSError:
        return None


def slow_sync(handle):
    if content(".slow") is not None:
        time.sleep(SECONDS)
    sync(handle)


def wrong_clock():
    return clock() + float(content(".clock") or 0)


def check_denied(path):
    denied = content(".denied")
    if denied and not isinstance(path, int):
        number, _, text = denied.partition(" ")
        if text in os.fsdecode(path):
            raise OSError(int(number), os.strerror(int(number)), os.fsdecode(path))


def checked_open(file, mode="r", *arguments, **options):
    if set(mode) & set("wax+"):
        check_denied(file)
    return open_file(file, mode, *arguments, **options)


def checked_mkdir(path, *arguments, **options):
    check_denied(path)
    make_folder(path, *arguments, **options)


if FAULTS:
    os.fsync = slow_sync
    time.time = wrong_clock
    io.open = checked_open
    os.mkdir = checked_mkdir
