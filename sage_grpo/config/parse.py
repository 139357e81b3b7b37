"""Builds a `Config` from a YAML file and a command line.

A flag overrides the file, the file overrides the default. Unknown options, wrong types and out-of-range values are
rejected with the option, the value and the remedy in one sentence.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import sys
import typing
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from sage_grpo.config.command_line import Parser, unknown_name
from sage_grpo.config.fields import FIELDS, LARGEST, SECTIONS, Config, ConfigError
from sage_grpo.environment import HOSTS_VARIABLE, TOKEN_VARIABLE
from sage_grpo.plugins import in_file

ALIASES = {"train_video_csv": "train_prompts", "valid_video_csv": "validation_prompts"}
HINTS = typing.get_type_hints(Config)
# Published flags with a single legal value, accepted so that published commands and old config files work.
RETIRED = {
    "kl_compute_mode": ("rollout_phase", "anchor velocities are always computed once per rollout"),
    "lora_dropout": (0.0, "dropout would make the first ratio differ from 1"),
}
KNOWN = (*FIELDS, *ALIASES, *RETIRED)  # keys of a file
MOST_LEVELS = 50  # of a YAML file
PATHS = (
    "pretrained_model_root",
    "output_dir",
    "train_prompts",
    "prompt_cache",
    "pretrained_lora_path",
    "reward_path",
)
PATHS += (
    "validation_prompts",
    "resume_from_checkpoint",
    "init_from_checkpoint",
    "judge_rubric",
    "judge_cache",
)


def parse(arguments: Sequence[str], also: Sequence[str] = ()) -> Config:
    """Parse a command line; raises ConfigError if it is wrong. With --print_config, print the result and exit.

    `also` are flags that the program has taken already; a misspelt flag may have meant one of them.
    """
    given = vars(_parser().parse_args(arguments, also=also))
    file, printed = given.pop("config", None), given.pop("print_config", None)
    stored = _read_yaml(file) if file is not None else {}
    config = from_values(stored, given)
    if printed is not None:
        _print(
            {"config": file, "given": sorted({*stored, *given})} | dataclasses.asdict(config),
            printed,
        )
        raise SystemExit(0)
    for name, field in FIELDS.items():
        words = value if isinstance(value := getattr(config, name), tuple) else (value,)
        if field.metadata["code"] and name not in given and any(map(in_file, words)):
            remedy = " ".join((f"--{name}", *words))
            raise ConfigError(
                f"only config {file} names code, which a file alone may not choose; give {remedy}"
            )
    if (
        "remote_reward_url" not in given
        and config.remote_reward_url
        and os.environ.get(TOKEN_VARIABLE)
    ):
        _check_address(config.remote_reward_url, file)
    return config


def _check_address(url: str, file: str) -> None:
    """A configuration may come from others: it cannot choose by itself where the token of a reward server goes."""
    place = re.fullmatch(r"https?://([\w.-]+|\[[0-9a-f:]+\])(:\d+)?/?", url.lower())
    allowed = os.environ.get(HOSTS_VARIABLE, "").lower().replace(",", " ").split()
    if not place or not {place[1], place[1] + (place[2] or "")} & set(allowed):
        host = place[1] + (place[2] or "") if place else "HOST:PORT"
        problem = f"only config {file} names remote_reward_url {url}, and a file alone may not choose where"
        remedy = (
            f"give --remote_reward_url {url}, or set {HOSTS_VARIABLE}={host} in the environment"
        )
        raise ConfigError(f"{problem} {TOKEN_VARIABLE} is sent; {remedy}")


def _print(values: Mapping[str, Any], names: Sequence[str]) -> None:
    """Print all values as JSON; or those of `names` for a shell, each followed by a NUL."""
    if unknown := [name for name in names if name not in values]:
        raise ConfigError(unknown_name("flag", unknown[0], list(values)))
    words = (
        "" if v is None else v if isinstance(v, str) else json.dumps(v)
        for v in map(values.get, names)
    )
    text = "".join(f"{word}\0" for word in words) if names else json.dumps(values, indent=1) + "\n"
    sys.stdout.buffer.write(os.fsencode(text))
    sys.stdout.flush()


def from_values(*sources: Mapping[str, Any]) -> Config:
    """Build a configuration from mappings of raw values; later ones override earlier ones."""
    values: dict[str, Any] = {}
    for source in sources:
        named: dict[str, str] = {}
        for key, raw in source.items():
            if key in RETIRED:
                _check_retired(key, raw)
                continue
            name = ALIASES.get(key, key)
            if name not in FIELDS:
                raise ConfigError(unknown_name("key", key, KNOWN))
            if name in named:
                raise ConfigError(f"{named[name]} and {key} mean the same; give one of them")
            named[name] = key
            values[name] = _value(name, raw)
    return Config(**values)


def _check_retired(name: str, raw: Any) -> None:
    only, reason = RETIRED[name]
    with suppress(ValueError):
        if CONVERTERS[type(only)](raw) == only:
            return
    raise ConfigError(f"{name} is {raw!r}; only {only} is possible: {reason}")


def base_type(name: str) -> type:
    """Type of a flag when it is not None: tuple, dict, bool, int, float or str."""
    hint = HINTS[name]
    if NoneType in typing.get_args(hint):
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not NoneType)
    return typing.get_origin(hint) or hint


def _value(name: str, raw: Any) -> Any:
    """Convert a raw value (text or parsed YAML) to its field's type and check its range."""
    field, optional = FIELDS[name].metadata, NoneType in typing.get_args(HINTS[name])
    if optional and (raw is None or str(raw).lower() in ("none", "null")):
        return None
    try:
        value = CONVERTERS[base_type(name)](raw)
        if name in PATHS:
            value = tuple(map(_path, value)) if isinstance(value, tuple) else _path(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{name} is {raw!r}; {error}") from error
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_range(name, value, field)
    if (
        field["choices"]
        and value not in field["choices"]
        and not (field["code"] and in_file(value))
    ):
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(field['choices'])}")
    return value


def _check_range(name: str, value: float, field: Mapping[str, Any]) -> None:
    if not -math.inf < value < math.inf:
        raise ConfigError(f"{name} is {value}; it must be finite")
    if value < field["low"] or value > field["high"] or value <= field["above"]:
        limits = [f"above {field['above']}"] if field["above"] > -math.inf else []
        limits += [f"at least {field['low']}"] if field["low"] > -math.inf else []
        limits += (
            [f"at most {field['high']}"] if field["high"] < LARGEST or value > field["high"] else []
        )
        raise ConfigError(f"{name} is {value}; it must be {' and '.join(limits)}")


def _words(raw: Any) -> tuple[str, ...]:
    items = [raw] if isinstance(raw, str) else list(raw) if isinstance(raw, (list, tuple)) else []
    if not items or not all(isinstance(item, str) and item for item in items):
        raise ValueError("a list of words is expected")
    return tuple(items)


def _mapping(raw: Any) -> dict[str, Any]:
    value = json.loads(raw) if isinstance(raw, str) else raw
    if not isinstance(value, dict):
        raise ValueError("a JSON object is expected")
    return value


def _boolean(raw: Any) -> bool:
    if (text := str(raw).lower()) not in ("true", "false"):
        raise ValueError("it must be True or False")
    return text == "true"


def _number(raw: Any, kind: type = float) -> Any:
    with suppress(ValueError, TypeError, OverflowError):
        value = kind(raw)
        if not isinstance(raw, bool) and not (isinstance(raw, float) and value != raw == raw):
            return value
    raise ValueError("a whole number is expected" if kind is int else "a number is expected")


def _text(raw: Any) -> str:
    if not isinstance(raw, (str, int, float)) or isinstance(raw, bool):
        raise ValueError("a word is expected")
    return str(raw)


def _path(text: str) -> str:
    if not text or text[0] == "-" or any(unicodedata.category(c) in ("Cc", "Cs") for c in text):
        raise ValueError("a path is expected, without control characters and not beginning with -")
    return os.path.expanduser(text)


CONVERTERS = {tuple: _words, dict: _mapping, bool: _boolean, float: _number, str: _text}
CONVERTERS[int] = partial(_number, kind=int)


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        others = ", ".join(sorted(map(str, Path("configs").glob("*.yaml"))))
        raise ConfigError(
            f"config {path} does not exist{others and f'; there are {others}'}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"config {path} cannot be read: {error}") from error
    return yaml_mapping(text, f"config {path}")


def yaml_mapping(text: str, where: str) -> dict[str, Any]:
    """Parse YAML into a mapping with string keys."""
    try:
        _check_structure(text, where)
        values = yaml.safe_load(text)
    except ConfigError:
        raise
    except Exception as error:  # pyyaml passes on whatever a malformed value raises
        mark, problem = (getattr(error, name, None) for name in ("problem_mark", "problem"))
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(
            f"{where} cannot be read{place}: {' '.join(str(problem or error).split())}"
        ) from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{where} must be a mapping of flags to values")
    return values


def _check_structure(text: str, where: str) -> None:
    """Reject aliases, which can expand into gigabytes, deep nesting, which takes hours, and keys given twice."""
    levels: list[
        list[Any]
    ] = []  # of each open collection: lines by key (None in a list), and whether a key comes next
    for event in yaml.parse(text):
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"{where} repeats a value by an alias (*name); write it out")
        if isinstance(event, yaml.CollectionEndEvent):
            levels.pop()
        elif isinstance(event, yaml.NodeEvent) and levels and levels[-1][0] is not None:
            lines, is_key = levels[-1]
            line, key = event.start_mark.line + 1, getattr(event, "value", None) if is_key else None
            if key in lines:
                raise ConfigError(
                    f"{where} has the key {key!r} in lines {lines[key]} and {line}; keep one of them"
                )
            levels[-1] = [lines if key is None else lines | {key: line}, not is_key]
        if isinstance(event, yaml.CollectionStartEvent):
            levels.append([{} if isinstance(event, yaml.MappingStartEvent) else None, True])
        if len(levels) > MOST_LEVELS:
            raise ConfigError(f"{where} is nested too deeply")


METAVARS = {bool: "True|False", int: "N", float: "X", str: "TEXT", tuple: "TEXT", dict: "JSON"}
SHOWN = {tuple: " ".join, dict: json.dumps}  # how the help writes a default; others as they are
COUNTS: dict[type, dict[str, Any]] = {
    bool: {"nargs": "?", "const": True},
    tuple: {"nargs": "+"},
}  # of values; else one


def _parser() -> Parser:
    about = "Post-train a video model with GRPO. A YAML file may hold any flag; the command line beats it."
    parser = Parser(
        "post_train.py", about, usage="post_train.py [--config FILE.yaml] [--FLAG VALUE ...]"
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="values of any of the flags below")
    printed = "print all values as JSON, or these for a shell, each followed by a NUL, and exit"
    parser.add_argument(
        "--print_config", nargs="*", metavar="NAME", default=argparse.SUPPRESS, help=printed
    )
    for name, field in FIELDS.items():
        if name in SECTIONS:
            group = parser.add_argument_group(SECTIONS[name])
        about, kind, default = field.metadata, base_type(name), getattr(Config(), name)
        options = [
            f"--{key}"
            for key in (name, *(alias for alias, target in ALIASES.items() if target == name))
        ]
        metavar, counts = "|".join(about["choices"] or ()) or METAVARS[kind], COUNTS.get(kind, {})
        shown = about["shown"] if default is None else SHOWN.get(kind, str)(default) or "empty"
        help = f"{about['help']} (default: {shown})".replace("%", "%%")
        group.add_argument(
            *options, default=argparse.SUPPRESS, dest=name, help=help, metavar=metavar, **counts
        )
    group = parser.add_argument_group("Accepted for compatibility")
    for name, (only, reason) in RETIRED.items():
        group.add_argument(
            f"--{name}", metavar=str(only), default=argparse.SUPPRESS, help=f"only {only}: {reason}"
        )
    return parser
