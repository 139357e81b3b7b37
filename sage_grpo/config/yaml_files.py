"""Reads a mapping from YAML, and refuses what YAML allows but a configuration should not contain."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sage_grpo.config.fields import ConfigError

MAX_DEPTH = 50  # nested collections


def read_yaml(path: str) -> dict[str, Any]:
    """The mapping in a configuration file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        recipes = ", ".join(sorted(map(str, Path("configs").glob("*.yaml"))))
        suggestion = f"; there are {recipes}" if recipes else ""
        raise ConfigError(f"config {path} does not exist{suggestion}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"config {path} cannot be read: {reason}") from error
    return yaml_mapping(text, f"config {path}")


def yaml_mapping(text: str, where: str) -> dict[str, Any]:
    """Parse YAML into a mapping with string keys; `where` names the text in errors.

    The loader in C takes a tenth of the time of `yaml.safe_load`, which reads a whole configuration in 0.1 s.
    """
    try:
        _check_structure(text, where)
        values = yaml.CSafeLoader(text).get_single_data()
    except ConfigError:
        raise
    except Exception as error:  # pyyaml passes on whatever a malformed value raises
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = str(getattr(error, "problem", None) or error)
        one_line = " ".join(problem.split())
        raise ConfigError(f"{where} cannot be read{place}: {one_line}") from error

    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{where} must be a mapping of flags to values")
    return values


@dataclass
class _Collection:
    """A list or mapping that the parser is inside of."""

    is_mapping: bool
    key_lines: dict[str, int] = field(default_factory=dict)  # line of each key so far
    expects_key: bool = True  # keys and values of a mapping alternate


def _check_structure(text: str, where: str) -> None:
    """Reject aliases, which can expand into gigabytes, deep nesting, which takes hours, and keys given twice."""
    open_collections: list[_Collection] = []
    for event in yaml.parse(text, yaml.CSafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"{where} repeats a value by an alias (*name); write it out")
        if isinstance(event, yaml.CollectionEndEvent):
            open_collections.pop()
        elif isinstance(event, yaml.NodeEvent) and open_collections:
            _visit(open_collections[-1], event, where)
        if isinstance(event, yaml.CollectionStartEvent):
            open_collections.append(_Collection(isinstance(event, yaml.MappingStartEvent)))
        if len(open_collections) > MAX_DEPTH:
            raise ConfigError(f"{where} is nested too deeply")


def _visit(collection: _Collection, event: yaml.NodeEvent, where: str) -> None:
    """Note a key of a mapping, or pass over a value; an error if the mapping already has the key."""
    if not collection.is_mapping:
        return
    if collection.expects_key and isinstance(event, yaml.ScalarEvent):
        key = event.value
        line = event.start_mark.line + 1
        if key in collection.key_lines:
            first = collection.key_lines[key]
            raise ConfigError(
                f"{where} has the key {key!r} in lines {first} and {line}; keep one of them"
            )
        collection.key_lines[key] = line
    collection.expects_key = not collection.expects_key
