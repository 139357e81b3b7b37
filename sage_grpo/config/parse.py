"""Builds a `Config` from a YAML file and a command line.

A flag overrides the file, the file overrides the default. Unknown options, wrong types and out-of-range values are
rejected with the option, the value and the remedy in one sentence.
"""

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from sage_grpo.config.command_line import Parser, unknown_name
from sage_grpo.config.fields import FIELDS, SECTIONS, Config, ConfigError, flag_info
from sage_grpo.config.values import CONVERTERS, base_type, convert
from sage_grpo.config.yaml_files import read_yaml
from sage_grpo.environment import HOSTS_VARIABLE, TOKEN_VARIABLE
from sage_grpo.plugins import in_file, trust

ALIASES = {
    "train_video_csv": "train_prompts",
    "valid_video_csv": "validation_prompts",
}


@dataclasses.dataclass(frozen=True)
class RetiredFlag:
    """A published flag with a single legal value, accepted so that published commands and old files still work."""

    value: Any
    reason: str


RETIRED = {
    "kl_compute_mode": RetiredFlag(
        "rollout_phase", "anchor velocities are always computed once per rollout"
    ),
    "lora_dropout": RetiredFlag(0.0, "dropout would make the first ratio differ from 1"),
}
# flags that users expect but this program lacks, with what to use instead
INSTEAD = {
    "--dry_run": "`python -m sage_grpo.tools.plan` computes memory, time and cost, "
    "and `python -m sage_grpo.tools.doctor` tries an iteration without training: "
    "give either the same flags",
}
FILE_KEYS = (*FIELDS, *ALIASES, *RETIRED)


def parse(
    arguments: Sequence[str], also: Sequence[str] = (), not_from_file: Collection[str] = ()
) -> Config:
    """Parse a command line; raises ConfigError if it is wrong. With --print_config, print the result and exit.

    also: flags that the program has taken already; a misspelled flag may have meant one of them. not_from_file: flags
    whose values in the configuration file are ignored.
    """
    from_command_line = vars(_parser().parse_args(arguments, also=also))
    file = from_command_line.pop("config", None)
    names_to_print = from_command_line.pop("print_config", None)
    from_file = {} if file is None else read_yaml(file)
    from_file = {
        key: raw for key, raw in from_file.items() if ALIASES.get(key, key) not in not_from_file
    }
    config = from_values(from_file, from_command_line)

    if names_to_print is not None:
        given = sorted({*from_file, *from_command_line})
        values = {"config": file, "given": given} | dataclasses.asdict(config)
        _print(values, names_to_print)
        raise SystemExit(0)

    _check_code(config, from_command_line, file)
    _trust_code(config, from_command_line)
    if "remote_reward_url" not in from_command_line:
        _check_address(config.remote_reward_url, file)
    return config


def from_values(*sources: Mapping[str, Any]) -> Config:
    """Build a configuration from mappings of raw values; later ones override earlier ones.

    The values may come from a stored file: code that they name (FILE.py:NAME) is not trusted by this.
    """
    values: dict[str, Any] = {}
    for source in sources:
        key_of: dict[str, str] = {}  # how this source spells each flag
        for key, raw in source.items():
            if key in RETIRED:
                _check_retired(key, raw)
                continue
            name = ALIASES.get(key, key)
            if name not in FIELDS:
                raise ConfigError(unknown_name("key", key, FILE_KEYS))
            if name in key_of:
                raise ConfigError(f"{key_of[name]} and {key} mean the same; give one of them")
            key_of[name] = key
            values[name] = convert(name, raw)
    return Config(**values)


def _check_retired(name: str, raw: Any) -> None:
    retired = RETIRED[name]
    with suppress(ValueError):
        if CONVERTERS[type(retired.value)](raw) == retired.value:
            return
    raise ConfigError(f"{name} is {raw!r}; only {retired.value} is possible: {retired.reason}")


# A configuration file may come from others: there are two things that it cannot choose by itself.


def _check_code(config: Config, from_command_line: Collection[str], file: str | None) -> None:
    """Code to run (FILE.py:NAME) must be named on the command line."""
    for name in FIELDS:
        if not flag_info(name).allows_code or name in from_command_line:
            continue
        words = _words(getattr(config, name))
        if any(map(in_file, words)):
            remedy = " ".join((f"--{name}", *words))
            raise ConfigError(
                f"only config {file} names code, which a file alone may not choose; give {remedy}"
            )


def _trust_code(config: Config, from_command_line: Collection[str]) -> None:
    """Allow the code (FILE.py:NAME) that the command line names to run in this process."""
    for name in from_command_line:
        if name in FIELDS and flag_info(name).allows_code:
            trust(*_words(getattr(config, name)))


def _words(value: str | tuple[str, ...] | None) -> tuple[str | None, ...]:
    return value if isinstance(value, tuple) else (value,)


def _check_address(url: str | None, file: str | None) -> None:
    """Where the token of a reward server is sent must be confirmed by the command line or the environment."""
    if not url or not os.environ.get(TOKEN_VARIABLE):
        return
    allowed = os.environ.get(HOSTS_VARIABLE, "").lower().replace(",", " ").split()
    address = re.fullmatch(r"https?://([\w.-]+|\[[0-9a-f:]+\])(:\d+)?/?", url.lower())
    if address:
        host = address[1]
        host_and_port = host + (address[2] or "")
        if host in allowed or host_and_port in allowed:
            return
    else:
        host_and_port = "HOST:PORT"
    raise ConfigError(
        f"only config {file} names remote_reward_url {url}, and a file alone may not choose where "
        f"{TOKEN_VARIABLE} is sent; give --remote_reward_url {url}, "
        f"or set {HOSTS_VARIABLE}={host_and_port} in the environment"
    )


def _print(values: Mapping[str, Any], names: Sequence[str]) -> None:
    """Print all values as JSON; or those of `names` for a shell, each followed by a NUL."""
    unknown = [name for name in names if name not in values]
    if unknown:
        raise ConfigError(unknown_name("flag", unknown[0], list(values)))
    if names:
        text = "".join(_shell_word(values[name]) + "\0" for name in names)
    else:
        text = json.dumps(values, indent=1) + "\n"
    sys.stdout.buffer.write(os.fsencode(text))
    sys.stdout.flush()


def _shell_word(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


METAVARS = {bool: "True|False", int: "N", float: "X", str: "TEXT", tuple: "TEXT", dict: "JSON"}
# a flag takes one value, except for these types
NARGS: dict[type, dict[str, Any]] = {
    bool: {"nargs": "?", "const": True},
    tuple: {"nargs": "+"},
}


def _parser() -> Parser:
    """The parser of all flags, whose defaults stay out of the result: `Config` holds them."""
    parser = Parser(
        "post_train.py",
        "Post-train a video model with GRPO, AWM or DiffusionNFT. "
        "A YAML file may set any flag; the command line overrides it.",
        usage="post_train.py [--config FILE.yaml] [--FLAG VALUE ...]",
    )
    parser.instead = INSTEAD
    parser.add_argument("--config", metavar="FILE.yaml", help="values of any of the flags below")
    parser.add_argument(
        "--print_config",
        nargs="*",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help="print all values as JSON, or these for a shell, each followed by a NUL, and exit",
    )
    for title, section in SECTIONS.items():
        group = parser.add_argument_group(title)
        for field in dataclasses.fields(section):
            _add_flag(group, field.name)

    group = parser.add_argument_group("Accepted for compatibility")
    for name, retired in RETIRED.items():
        group.add_argument(
            f"--{name}",
            metavar=str(retired.value),
            default=argparse.SUPPRESS,
            help=f"only {retired.value}: {retired.reason}",
        )
    return parser


def _add_flag(group: Any, name: str) -> None:
    info = flag_info(name)
    kind = base_type(name)
    aliases = [alias for alias, target in ALIASES.items() if target == name]
    help = f"{info.help} (default: {_default_text(name)})"
    group.add_argument(
        *(f"--{spelling}" for spelling in (name, *aliases)),
        dest=name,
        default=argparse.SUPPRESS,
        metavar="|".join(info.choices) if info.choices else METAVARS[kind],
        help=help.replace("%", "%%"),
        **NARGS.get(kind, {}),
    )


def _default_text(name: str) -> str:
    """How the help shows the default of a flag."""
    default = getattr(Config(), name)
    if default is None:
        return str(flag_info(name).default_text)
    if isinstance(default, tuple):
        return " ".join(default)
    if isinstance(default, dict):
        return json.dumps(default)
    return str(default) or "empty"
