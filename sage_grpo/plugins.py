"""Code that a setting can name: rows of fixed tables and, on a command line, also `FILE.py:NAME`.

A row maps a name to `module:attribute`, so that a table can be read without importing what it names.

A file of plug-ins runs only if the command line of this process named it: programs call `trust` with the values of
their own flags, and `resolved` refuses all other names. A stored configuration may name code, but cannot make it run.
"""

import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any

_trusted: set[str] = set()  # each `FILE.py:NAME` from the command line of this process


def load(table: Mapping[str, Any], name: str) -> Any:
    """The object that a row names, imported now. A row may also hold the object itself."""
    row = table[name]
    if not isinstance(row, str):
        return row
    module, _, attribute = row.partition(":")
    return getattr(import_module(module), attribute)


def in_file(name: str | None) -> bool:
    """Whether `name` is `FILE.py:NAME`, which `config/parse.py` allows on a command line only."""
    return bool(re.fullmatch(r".+\.py:[^\W\d]\w*", name or ""))


def label(name: str) -> str:
    """What `name` is called in weights and metrics: NAME for `FILE.py:NAME`, else the name itself."""
    return name.rpartition(":")[2]


def trust(*names: str | None) -> None:
    """Allow code that the operator named: call this with values of the command line, never with those of a file."""
    _trusted.update(name for name in names if in_file(name))


def is_trusted(name: str | None) -> bool:
    """Whether `name` is a row of a table, or code that `trust` allowed."""
    return not in_file(name) or name in _trusted


def resolved(name: str) -> Any:
    """Run `FILE.py` and return its `NAME`, any failure in one sentence; other names are returned unchanged.

    Code that was not passed to `trust` is refused, and its file is not opened.
    """
    if not in_file(name):
        return name
    if not is_trusted(name):
        raise ValueError(
            f"{name!r:.300} is code that only a file names, and it was not run;"
            " if you trust it, name it on the command line"
        )
    path = Path(name.rpartition(":")[0])
    module_name = f"plugin_{path.stem}"
    spec = spec_from_file_location(module_name, path, loader=_FromSource(module_name, str(path)))
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up here
    with contained(f"{name} cannot be loaded", passes=()):
        spec.loader.exec_module(module)
        return getattr(module, label(name))


class _FromSource(SourceFileLoader):
    """Runs what the file says now: bytecode beside it can be older, or somebody else's."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


@contextmanager
def contained(
    problem: str, passes: tuple[type[Exception], ...] = (ValueError, OSError)
) -> Iterator[None]:
    """Context of code that may do anything: what it raises becomes a ValueError that begins with `problem`.

    Its own SystemExit and KeyboardInterrupt are failures too; a Ctrl-C, which is a signal, still interrupts.
    passes: errors that already are such sentences; they are raised unchanged.
    """
    with _watching_for_interrupt() as interrupts:
        try:
            yield
        except passes:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if interrupts:
                raise
            raise ValueError(f"{problem}: {' '.join(error_text(error).split())}") from error


def error_text(error: BaseException) -> str:
    """`TYPE: MESSAGE` of what foreign code raised, whose `__str__` is foreign code as well."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:
        return f"{name}: (its message cannot be shown)"


@contextmanager
def _watching_for_interrupt() -> Iterator[list[int]]:
    """Context in which a Ctrl-C is noted in a list, and then does what it did before."""
    interrupts: list[int] = []
    previous = signal.getsignal(signal.SIGINT)
    # signals reach the main thread alone
    if not callable(previous) or threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def note(number: int, frame: Any) -> None:
        interrupts.append(number)
        previous(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)
