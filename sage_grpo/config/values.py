"""Converts raw values, from a YAML file or a command line, to the types of the flags, and checks their ranges."""

import json
import math
import os
import typing
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from types import NoneType
from typing import Any

from sage_grpo.config.fields import MAX_NUMBER, Config, ConfigError, FlagInfo, flag_info
from sage_grpo.files.paths import MAX_NAME_BYTES, MAX_PATH_BYTES, is_too_long, shown
from sage_grpo.plugins import in_file

HINTS = typing.get_type_hints(Config)


def base_type(name: str) -> type:
    """Type of a flag when it is not None: tuple, dict, bool, int, float or str."""
    hint = HINTS[name]
    if is_optional(name):
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not NoneType)
    return typing.get_origin(hint) or hint


def is_optional(name: str) -> bool:
    """Whether a flag may be None."""
    return NoneType in typing.get_args(HINTS[name])


def convert(name: str, raw: Any) -> Any:
    """Convert a raw value (text or parsed YAML) to its flag's type; ConfigError if it is out of range."""
    if is_optional(name) and (raw is None or str(raw).lower() in ("none", "null")):
        return None

    info = flag_info(name)
    try:
        value = CONVERTERS[base_type(name)](raw)
        if info.is_path:
            value = tuple(map(_path, value)) if isinstance(value, tuple) else _path(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{name} is {shown(repr(raw))}; {error}") from error

    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_range(name, value, info)
    if info.choices and value not in info.choices and not (info.allows_code and in_file(value)):
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(info.choices)}")
    return value


def _check_range(name: str, value: float, info: FlagInfo) -> None:
    if not -math.inf < value < math.inf:
        raise ConfigError(f"{name} is {value}; it must be finite")
    if info.minimum <= value <= info.maximum and value > info.above:
        return

    limits = []
    if info.above > -math.inf:
        limits.append(f"above {info.above}")
    if info.minimum > -math.inf:
        limits.append(f"at least {info.minimum}")
    # the general maximum is named only to those who exceed it
    if info.maximum < MAX_NUMBER or value > info.maximum:
        limits.append(f"at most {info.maximum}")
    raise ConfigError(f"{name} is {value}; it must be {' and '.join(limits)}")


def _words(raw: Any) -> tuple[str, ...]:
    words = [raw] if isinstance(raw, str) else raw
    is_list = isinstance(words, (list, tuple)) and len(words) > 0
    if not is_list or not all(isinstance(word, str) and word for word in words):
        raise ValueError("a list of words is expected")
    return tuple(words)


def _mapping(raw: Any) -> dict[str, Any]:
    value = json.loads(raw) if isinstance(raw, str) else raw
    if not isinstance(value, dict):
        raise ValueError("a JSON object is expected")
    return value


def _boolean(raw: Any) -> bool:
    text = str(raw).lower()
    if text not in ("true", "false"):
        raise ValueError("it must be True or False")
    return text == "true"


def _float(raw: Any) -> float:
    if not isinstance(raw, bool):
        with suppress(ValueError, TypeError, OverflowError):
            return float(raw)
    raise ValueError("a number is expected")


def _integer(raw: Any) -> int:
    if not isinstance(raw, bool):
        with suppress(ValueError, TypeError, OverflowError):
            value = int(raw)
            if not isinstance(raw, float) or value == raw:  # 2.0 is a whole number, 2.5 is not
                return value
    raise ValueError("a whole number is expected")


def _text(raw: Any) -> str:
    if not isinstance(raw, (str, int, float)) or isinstance(raw, bool):
        raise ValueError("a word is expected")
    return str(raw)


def _path(text: str) -> str:
    has_control_characters = any(unicodedata.category(c) in ("Cc", "Cs") for c in text)
    if not text or text.startswith("-") or has_control_characters:
        raise ValueError("a path is expected, without control characters and not beginning with -")
    path = os.path.expanduser(text)
    if is_too_long(path):
        raise ValueError(
            f"a path has at most {MAX_PATH_BYTES} bytes, and each name in it {MAX_NAME_BYTES}"
        )
    return path


CONVERTERS: dict[type, Callable[[Any], Any]] = {
    tuple: _words,
    dict: _mapping,
    bool: _boolean,
    int: _integer,
    float: _float,
    str: _text,
}
