"""Text from elsewhere (prompts, names, settings, answers of servers) made safe for a terminal and for Markdown."""

import re
from pathlib import PurePath
from typing import Any


def terminal_text(text: Any) -> str:
    """The text with a ? for each character that a terminal would act on, such as an escape; lines stay lines."""
    return "".join(
        character if character.isprintable() or character == "\n" else "?"
        for character in str(text)
    )


def markdown(text: Any) -> str:
    """The text in one line, with what Markdown or HTML would take for markup escaped."""
    one_line = " ".join(str(text).split())
    return re.sub(r"[\\`*_\[\]<>|~&#!:]", r"\\\g<0>", terminal_text(one_line))


def without_folders(value: Any, is_path: bool = False) -> Any:
    """A setting whose paths are reduced to their last part: folders name users, machines and projects.

    is_path: treat text as a path even if it does not look like one, as relative paths do not.
    """
    if isinstance(value, dict):
        return {key: without_folders(part, is_path) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_folders(part, is_path) for part in value]
    if not isinstance(value, str):
        return value
    leaves = value.startswith(("/", "~")) or ".." in PurePath(value).parts
    return PurePath(value).name if is_path or leaves else value
