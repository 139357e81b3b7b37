"""One run at a time in a run folder, also on a shared file system without flock.

RUN/lock names the process that trains there. It is created exclusively, and its modification time is renewed every BEAT
seconds, which needs no room on a full disk. A lock from this machine is stale once its process has ended; one from
elsewhere after STALE looks in a row that found it unchanged. Clocks of two machines are never compared, and while the
file system hangs, no process can look. Only the holder of a second lock, `lock.after-*`, removes a stale one.
"""

import os
import platform
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sage_grpo.config.fields import ConfigError
from sage_grpo.exit_codes import FAILED

NAME = "lock"
BEAT = 5.0  # seconds between renewals
LOOK = 1.0  # seconds between looks at somebody else's lock
STALE = 60  # looks
WAIT = 120.0  # seconds that a patient start waits for the end of another run


@dataclass(frozen=True)
class Seen:
    """A lock file as one look found it."""

    content: bytes
    modified: int  # nanoseconds


@dataclass(frozen=True)
class Owner:
    """The process that a lock names."""

    description: str  # for messages
    pid: str  # of a process on this machine; empty for all others
    started: str  # when that process started


class Lock:
    """Holds a folder until it is released or no longer referred to, or the process ends."""

    def __init__(self, folder: Path, patient: bool, wait: float) -> None:
        """ConfigError says who holds the folder; a `patient` start waits `wait` seconds for that run to end."""
        pid = os.getpid()
        self.path = folder / NAME
        self.content = _content(pid)
        self.looks: dict[Path, tuple[Seen, int]] = {}  # as last seen, and how often unchanged since

        new_folders = [place for place in (folder, *folder.parents) if not place.exists()]
        stop = threading.Event()
        self.release = weakref.finalize(
            self, _release, self.path, self.content, new_folders, stop, pid
        )
        try:
            self._acquire(patient, wait)
        except BaseException:
            self.release()
            raise

        for leftover in folder.glob(f"{NAME}.after-*"):  # of a start killed while it took over
            leftover.unlink(missing_ok=True)
        threading.Thread(
            target=_renew, args=(self.path, self.content, stop), name="lock", daemon=True
        ).start()

    def _acquire(self, patient: bool, wait: float) -> None:
        folder = self.path.parent
        deadline = time.monotonic() + wait
        previous = None
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            if _create(self.path, self.content):
                return
            seen = _look(self.path)
            if seen is None:  # released in between
                continue
            stale = self._is_stale(self.path, seen)
            if stale:
                self._remove(self.path, seen)
                if _look(self.path) != seen:
                    continue

            owner = _owner(seen.content)
            renewed = previous is not None and seen != previous
            alive = not stale and (owner.pid or (owner.description and renewed))
            in_use = f"output_dir {folder} is in use by {owner.description or 'an unknown process'}"
            if (alive and not patient) or time.monotonic() > deadline:
                raise ConfigError(
                    f"{in_use}; wait until that run has ended, stop it, or give another output_dir"
                )
            if previous is None:
                _print(f"note: {in_use}; waiting up to {wait:g} s until it has ended or seems dead")
            previous = seen
            time.sleep(LOOK)

    def _is_stale(self, path: Path, seen: Seen) -> bool:
        owner = _owner(seen.content)
        if owner.pid:
            is_this_process = owner.pid == str(os.getpid())
            return is_this_process or _start_time(owner.pid) != owner.started
        previous, unchanged = self.looks.get(path, (None, 0))
        unchanged = unchanged + 1 if seen == previous else 0
        self.looks[path] = seen, unchanged
        return unchanged >= STALE

    def _remove(self, path: Path, seen: Seen) -> None:
        """Remove a stale lock, unless another process is about to."""
        second_path = path.with_name(f"{NAME}.after-{seen.modified}")
        if _create(second_path, self.content):
            if _look(path) == seen:
                path.unlink(missing_ok=True)
            second_path.unlink(missing_ok=True)
            return
        second = _look(second_path)
        if second and self._is_stale(second_path, second):
            self._remove(second_path, second)


# content of a lock


def _content(pid: int) -> bytes:
    description = f"process {pid} on {platform.node()} since {time.strftime('%F %T %z')}"
    lines = (description, _machine(), str(pid), _start_time(str(pid)), secrets.token_hex(8))
    return "\n".join(lines).encode()


def _owner(content: bytes) -> Owner:
    """The owner, as far as it can be read."""
    lines = [*content.decode(errors="replace").split("\n"), "", "", ""]
    description, machine, pid, started = lines[:4]
    description = description[:200] if description.isprintable() else ""
    if machine == _machine() and pid.isdecimal():
        return Owner(description, pid, started)
    return Owner(description, pid="", started="")


def _machine() -> str:
    """A name that is equal for processes that can see each other."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    if boot_id.exists():
        namespace = f"{boot_id.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    else:
        namespace = f"only {os.getpid()}"
    return f"{platform.node()} {namespace} user {os.getuid()}"


def _start_time(pid: str) -> str:
    """When a process started, in ticks after the boot; empty if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    state, *fields = stat.rpartition(b")")[2].decode().split()
    return "" if state in "ZX" else fields[18]  # a zombie has ended; its parent does not know yet


# the file


def _create(path: Path, content: bytes) -> bool:
    """Create a file; False if it exists, or if its folder has just been removed."""
    try:
        file = path.open("xb")
    except (FileExistsError, FileNotFoundError):
        return False
    try:
        with file:
            file.write(content)
    except OSError:
        path.unlink()
        raise
    return True


def _look(path: Path) -> Seen | None:
    """None if there is no lock. It is opened, because for that NFS asks the server."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return Seen(file.read(4096), os.fstat(file.fileno()).st_mtime_ns)
    except FileNotFoundError:
        return None


def _renew(path: Path, content: bytes, stop: threading.Event) -> None:
    """Runs in a thread. A deleted lock is created again; if another run has the folder, this process ends."""
    while not stop.wait(BEAT):
        try:
            seen = _look(path)
            if seen is None:
                if _create(path, content) and stop.is_set():
                    path.unlink(missing_ok=True)
            elif seen.content == content:
                os.utime(path)
            elif not stop.is_set():
                owner = _owner(seen.content)
                if owner.pid == str(os.getpid()):  # this process has opened the folder again
                    return
                _print(
                    f"post_train.py: output_dir {path.parent} was taken over by"
                    f" {owner.description or 'an unknown process'}; this run stops and writes no more to it"
                )
                os._exit(FAILED)
        except OSError as error:
            _print(f"note: {path} could not be renewed, trying again: {error}")


def _release(
    path: Path, content: bytes, new_folders: Sequence[Path], stop: threading.Event, pid: int
) -> None:
    """Remove the lock, and the folders made for it if they are empty; a fork does not."""
    stop.set()
    if pid != os.getpid():
        return
    # a folder may not be empty; a lock that has to stay is stale once this process has ended
    with suppress(OSError):
        seen = _look(path)
        if seen and seen.content == content:
            path.unlink()
        for folder in new_folders:
            folder.rmdir()


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
