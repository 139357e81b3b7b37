"""JSON files: errors name the file in one sentence, and writes are atomic."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LARGEST, MOST_LAYERS = 2**31, 1000  # far above any real model
KINDS = {
    int: f"a whole number above 0, below {LARGEST}",
    float: f"a number above 0, below {LARGEST}",
    tuple: "a list of whole numbers above 0",
    bool: "true or false",
    str: "a text",
}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    if not path.is_file():  # a pipe would be waited for
        raise FileNotFoundError(f"{path} is missing; download that folder again")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object; download it again")
    return values


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a model; numbers beyond any real model are rejected before something of that size is built."""
    config = read_object(path)
    pending = [config]
    for values in pending:  # grows while it is read
        pending += [value for value in values.values() if isinstance(value, dict)]
        for name, value in values.items():
            most = MOST_LAYERS if "layers" in name or "depth" in name else LARGEST
            size = len(value) if isinstance(value, list) else value
            if type(size) in (int, float) and not abs(size) < most:
                raise ValueError(
                    f"{path} has {name!r:.60} {value!r:.60}, but no model has {most}; download it again"
                )
    return config


def check_kinds(path: Path, values: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Reject values of another kind than expected, such as text in the place of a number."""
    for name, kind in kinds.items():
        if name in values and not _is_kind(values[name], kind):
            raise ValueError(f"{path} has {name} {values[name]!r:.100}; it must be {KINDS[kind]}")


def _is_kind(value: Any, kind: type) -> bool:
    if kind is tuple:
        return (
            isinstance(value, list) and bool(value) and all(_is_kind(part, int) for part in value)
        )
    if kind in (bool, str):
        return type(value) is kind
    return type(value) in (int, kind) and 0 < value < LARGEST


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in whatever other packages raise about its content, in one line."""
    try:
        yield
    except Exception as error:  # from KeyError to classes of their own
        if "out of memory" in str(error):
            raise
        text = printable(f"{type(error).__name__}: {error}")
        raise ValueError(f"{path} cannot be used ({text}); download it again") from error


def printable(text: Any) -> str:
    """A text from elsewhere in one line, without control characters."""
    return "".join(letter for letter in " ".join(str(text).split()) if letter.isprintable())[:300]


def write_json(path: Path, values: Any, ensure_ascii: bool = True) -> None:
    """Replace a file atomically: readers see either the old or the new content."""
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(
        json.dumps(finite(values), indent=1, ensure_ascii=ensure_ascii) + "\n", encoding="utf-8"
    )
    os.replace(draft, path)


def finite(value: Any) -> Any:
    """The value with NaN and infinities, which JSON lacks, replaced by None."""
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
