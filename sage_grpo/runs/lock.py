"""One run at a time in a run folder, also on a shared file system without flock.

RUN/lock names the process that trains there. It is created exclusively, and its modification time is renewed every BEAT
seconds, which needs no room on a full disk. A lock from this machine is stale once its process has ended; one from
elsewhere after STALE looks in a row that found it unchanged. Clocks of two machines are never compared, and while the
file system hangs, nobody can look. Only the holder of a second lock, `lock.after-*`, removes a stale one.
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
from pathlib import Path

from sage_grpo.config.fields import ConfigError
from sage_grpo.exit_codes import FAILED

NAME = "lock"
BEAT, LOOK = 5.0, 1.0  # seconds between renewals, and between looks at somebody else's lock
STALE = 60
WAIT = 120.0  # seconds that a patient start waits for the end of another run

Seen = tuple[bytes, int]  # content and modification time of a lock


class Lock:
    """Holds a folder until it is released or no longer referred to, or the process ends."""

    def __init__(self, folder: Path, patient: bool, wait: float) -> None:
        """ConfigError says who holds the folder; a `patient` start waits `wait` seconds for that run to end."""
        made = [place for place in (folder, *folder.parents) if not place.exists()]
        pid, stop = os.getpid(), threading.Event()
        who = f"process {pid} on {platform.node()} since {time.strftime('%F %T %z')}"
        words = (who, _machine(), str(pid), _started(str(pid)), secrets.token_hex(8))
        self.path, self.mine = folder / NAME, "\n".join(words).encode()
        self.looks: dict[
            Path, tuple[Seen, int]
        ] = {}  # locks as last seen, and how many times unchanged
        self.release = weakref.finalize(self, _release, self.path, self.mine, made, stop, pid)
        try:
            self._acquire(patient, wait)
        except BaseException:
            self.release()
            raise
        for left in folder.glob(f"{NAME}.after-*"):  # by a start that was killed while it took over
            left.unlink(missing_ok=True)
        threading.Thread(
            target=_renew, args=(self.path, self.mine, stop), name="lock", daemon=True
        ).start()

    def _acquire(self, patient: bool, wait: float) -> None:
        folder, end, before = self.path.parent, time.monotonic() + wait, None
        while folder.mkdir(parents=True, exist_ok=True) or not _create(self.path, self.mine):
            if (held := _look(self.path)) is None:
                continue
            if stale := self._is_stale(self.path, held):
                self._remove(self.path, held)
                if _look(self.path) != held:
                    continue
            who, pid, _ = _owner(held[0])
            lives = not stale and (pid or (who and before not in (None, held)))
            text = f"output_dir {folder} is in use by {who or 'an unknown process'}"
            if (lives and not patient) or time.monotonic() > end:
                raise ConfigError(
                    f"{text}; wait until that run has ended, stop it, or give another output_dir"
                )
            if before is None:
                print(
                    f"note: {text}; waiting up to {wait:g} s until it has ended or seems dead",
                    file=sys.stderr,
                )
            before = held
            time.sleep(LOOK)

    def _is_stale(self, path: Path, held: Seen) -> bool:
        _, pid, started = _owner(held[0])
        if pid:
            return pid == str(os.getpid()) or _started(pid) != started
        before, count = self.looks.get(path, (None, 0))
        self.looks[path] = held, count + 1 if held == before else 0
        return self.looks[path][1] >= STALE

    def _remove(self, path: Path, held: Seen) -> None:
        """Remove a stale lock, unless somebody else is about to."""
        second = path.with_name(f"{NAME}.after-{held[1]}")
        if _create(second, self.mine):
            if _look(path) == held:
                path.unlink(missing_ok=True)
            second.unlink(missing_ok=True)
        elif (other := _look(second)) and self._is_stale(second, other):
            self._remove(second, other)


def _machine() -> str:
    """What processes that see each other have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    seen = (
        f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
        if boot.exists()
        else f"only {os.getpid()}"
    )
    return f"{platform.node()} {seen} user {os.getuid()}"


def _started(pid: str) -> str:
    """When a process started, in ticks after the boot; empty if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in "ZX" else fields[18]  # a zombie has ended; its parent does not know yet


def _owner(content: bytes) -> tuple[str, str, str]:
    """Whom a lock names, and for a process of this machine its number and start; empty where that is unknown."""
    who, machine, pid, started, *_ = (*content.decode(errors="replace").split("\n"), "", "", "")
    here = machine == _machine() and pid.isdecimal()
    return who[:200] if who.isprintable() else "", *((pid, started) if here else ("", ""))


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
            return file.read(4096), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _renew(path: Path, mine: bytes, stop: threading.Event) -> None:
    """Runs in a thread. A deleted lock is created again; if another run has the folder, this process ends."""
    while not stop.wait(BEAT):
        try:
            if (held := _look(path)) is None:
                if _create(path, mine) and stop.is_set():
                    path.unlink(missing_ok=True)
            elif held[0] == mine:
                os.utime(path)
            elif not stop.is_set():
                who, pid, _ = _owner(held[0])
                if pid == str(os.getpid()):  # this process has opened the folder again
                    return
                text = f"output_dir {path.parent} was taken over by {who or 'an unknown process'}"
                print(
                    f"post_train.py: {text}; this run stops and writes no more to it",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(FAILED)
        except OSError as error:
            print(
                f"note: {path} could not be renewed, trying again: {error}",
                file=sys.stderr,
                flush=True,
            )


def _release(
    path: Path, mine: bytes, made: Sequence[Path], stop: threading.Event, pid: int
) -> None:
    """Remove the lock, and the folders made for it if they are empty; a fork does not."""
    stop.set()
    with suppress(
        OSError
    ):  # a folder is not empty; a lock that has to stay is stale once this process has ended
        if pid == os.getpid() and (held := _look(path)) and held[0] == mine:
            path.unlink()
        for folder in made if pid == os.getpid() else ():
            folder.rmdir()
