"""Everything that can be named: rows of fixed tables, and on a command line also `FILE.py:NAME`.

A row maps a name to `module:attribute`, so that a table can be read without importing what it names.
"""

import re
import sys
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import resolve_name
from typing import Any


def load(table: Mapping[str, Any], name: str) -> Any:
    """Import the object that a table row names. A row may also hold the object itself."""
    return resolve_name(table[name]) if isinstance(table[name], str) else table[name]


def in_file(name: str | None) -> bool:
    """Whether `name` is `FILE.py:NAME`. `flags.parse` lets only a command line name one."""
    return bool(re.fullmatch(r".+\.py:[^\W\d]\w*", name or ""))


def label(name: str) -> str:
    """What `name` is called in weights and metrics: of `FILE.py:NAME`, the second half."""
    return name.rpartition(":")[2]


def resolved(name: str) -> Any:
    """Run `FILE.py` and return its `NAME`, any failure in one sentence; another name is returned as it is."""
    if not in_file(name):
        return name
    path = Path(name.rpartition(":")[0])
    spec = spec_from_file_location(f"plugin_{path.stem}", path)
    module = sys.modules[spec.name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return getattr(module, label(name))
    except Exception as error:  # the file may do anything
        raise ValueError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
