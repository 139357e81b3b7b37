"""JSON files: errors name the file in one sentence, and writes are atomic."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sage_grpo.files.foreign import replace_text

# far above any real model
MAX_VALUE = 2**31
MAX_LAYERS = 1000

KINDS = {
    int: f"a whole number above 0, below {MAX_VALUE}",
    float: f"a number above 0, below {MAX_VALUE}",
    tuple: "a list of whole numbers above 0",
    bool: "true or false",
    str: "a text",
}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    if not path.is_file():  # opening a pipe would block
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
    _check_sizes(path, config)
    return config


def _check_sizes(path: Path, config: Mapping[str, Any]) -> None:
    """Reject numbers, and lists as long, beyond any real model; nested objects are searched too."""
    pending = [config]
    while pending:
        for name, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            size = len(value) if isinstance(value, list) else value
            limit = MAX_LAYERS if "layers" in name or "depth" in name else MAX_VALUE
            # written so that NaN is rejected too
            if type(size) in (int, float) and not abs(size) < limit:
                raise ValueError(
                    f"{path} has {name!r:.60} {value!r:.60}, but no model has {limit}; download it again"
                )


def check_kinds(path: Path, values: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Reject values of another kind than expected, such as text in place of a number; missing ones pass."""
    for name, kind in kinds.items():
        if name in values and not _is_kind(values[name], kind):
            raise ValueError(f"{path} has {name} {values[name]!r:.100}; it must be {KINDS[kind]}")


def _is_kind(value: Any, kind: type) -> bool:
    if kind is tuple:
        is_list = isinstance(value, list) and len(value) > 0
        return is_list and all(_is_kind(part, int) for part in value)
    if kind in (bool, str):
        return type(value) is kind
    # an int may stand for a float; a bool, which is an int too, stands for neither
    return type(value) in (int, kind) and 0 < value < MAX_VALUE


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn any error that other packages raise about a file's content into one line that names the file."""
    try:
        yield
    except Exception as error:  # anything from KeyError to classes of those packages
        if "out of memory" in str(error):  # not the file's fault
            raise
        text = printable(f"{type(error).__name__}: {error}")
        raise ValueError(f"{path} cannot be used ({text}); download it again") from error


def printable(text: Any) -> str:
    """Text from elsewhere in one line of at most 300 characters, without control characters."""
    one_line = " ".join(str(text).split())
    return "".join(character for character in one_line if character.isprintable())[:300]


def write_json(path: Path, values: Any, ensure_ascii: bool = True) -> None:
    """Replace a file atomically: readers see either the old or the new content."""
    text = json.dumps(finite(values), indent=1, ensure_ascii=ensure_ascii) + "\n"
    replace_text(path, text)


def finite(value: Any) -> Any:
    """The value with NaN and infinities, which JSON lacks, replaced by None."""
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
