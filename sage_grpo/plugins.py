"""Fixed tables of everything that a command line or a model folder can name: rewards, worlds, backbones.

A row maps a name to `module:attribute`, so that a table can be read without importing what it names.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def load(table: Mapping[str, Any], name: str) -> Any:
    """Import the object that a table row names. A row may also hold the object itself."""
    row = table[name]
    if not isinstance(row, str):
        return row
    module, _, attribute = row.partition(":")
    return getattr(import_module(module), attribute)
