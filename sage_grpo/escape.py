"""Text from elsewhere (prompts, names, settings, answers of servers) made safe for a terminal and for Markdown."""

import re
from pathlib import PurePath
from typing import Any


def plain(text: Any) -> str:
    """The text with a ? for each character that a terminal would act on, such as an escape; lines stay lines."""
    return "".join(
        character if character.isprintable() or character == "\n" else "?"
        for character in str(text)
    )


def markdown(text: Any) -> str:
    """The text in one line, with what Markdown or HTML would take for markup escaped."""
    one_line = " ".join(str(text).split())
    return re.sub(r"[\\`*_\[\]<>|~&#!:]", r"\\\g<0>", plain(one_line))


def without_folders(value: Any) -> Any:
    """A setting whose paths outside the working folder are reduced to their last part: they name users and machines."""
    if isinstance(value, dict):
        return {key: without_folders(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_folders(part) for part in value]
    if isinstance(value, str) and (value.startswith(("/", "~")) or ".." in PurePath(value).parts):
        return PurePath(value).name
    return value
