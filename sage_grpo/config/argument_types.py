"""Types of command-line arguments, for `type=` of argparse: each converts a text or says what is wrong with it."""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection

from sage_grpo.config.fields import MAX_NUMBER, MAX_SEED
from sage_grpo.plugins import in_file

MAX_DIGITS = 6  # of sizes and counts
MAX_PORT = 65535


def frame_size(text: str) -> tuple[int, int]:
    """HEIGHTxWIDTH in pixels."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(map(_is_short_number, parts)):
        raise ArgumentTypeError(f"{text!r} is not HEIGHTxWIDTH, such as 480x848")
    height, width = map(int, parts)
    return height, width


def aspect_ratio(text: str) -> float:
    """WIDTH:HEIGHT as a quotient."""
    parts = text.split(":")
    if len(parts) != 2 or not all(_is_short_number(part) and int(part) > 0 for part in parts):
        raise ArgumentTypeError(f"{text!r} is not WIDTH:HEIGHT, such as 16:9")
    width, height = map(int, parts)
    return width / height


def finite_number(text: str) -> float:
    """A number up to MAX_NUMBER in absolute value."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= MAX_NUMBER:
        raise ArgumentTypeError(f"{text!r} is not a finite number up to {MAX_NUMBER}")
    return number


def count(text: str) -> int:
    """A whole number above 0."""
    if not _is_short_number(text) or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1 to {10**MAX_DIGITS - 1}")
    return int(text)


def port(text: str) -> int:
    """A number of a TCP port."""
    if not _is_short_number(text) or int(text) > MAX_PORT:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 0 to {MAX_PORT}")
    return int(text)


def seed(text: str) -> int:
    """A whole number that fits into 63 bits."""
    if not text.isdigit() or len(text) > len(str(MAX_SEED)) or int(text) > MAX_SEED:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 0 to {MAX_SEED}")
    return int(text)


def name_or_code(names: Collection[str]) -> Callable[[str], str]:
    """The type of one of `names`, or FILE.py:NAME."""

    def convert(text: str) -> str:
        if text not in names and not in_file(text):
            raise ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}, or FILE.py:NAME")
        return text

    return convert


def _is_short_number(text: str) -> bool:
    return text.isdigit() and len(text) <= MAX_DIGITS
