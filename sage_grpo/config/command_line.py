"""The command line of every program: flags in full, wrong input answered with one sentence."""

import argparse
import difflib
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sage_grpo import __version__
from sage_grpo.config.fields import ConfigError
from sage_grpo.exit_codes import WRONG_INPUT


def unknown_name(what: str, name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"unknown {what} {name}" + (
        f"; did you mean {close[0]}?" if close else "; --help lists them all"
    )


class Parser(argparse.ArgumentParser):
    """Flags in full, with hyphens or underscores; what is wrong with them is a ConfigError, one sentence."""

    def __init__(self, program: str, about: str, **kwargs: Any) -> None:
        form = {"formatter_class": lambda prog: _Help(prog, max_help_position=32, width=110)}
        super().__init__(program, description=about, allow_abbrev=False, **form, **kwargs)
        self.add_argument("--version", action="version", version=f"sage-grpo {__version__}")

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = sys.argv[1:] if args is None else args
        words = [
            re.sub(r"^--[\w-]+", lambda flag: "--" + flag[0][2:].replace("-", "_"), word)
            for word in words
        ]
        return super().parse_known_args(words, namespace)

    def parse_args(
        self, args: Sequence[str] | None = None, also: Sequence[str] = ()
    ) -> argparse.Namespace:
        words = sys.argv[1:] if args is None else args
        named = [found[1] for word in words if (found := re.match(r"--([\w-]+)(=|$)", word))]
        unknown = [f"--{name}" for name in named if "--" + name.replace("-", "_") not in self.flags]
        known, rest = (
            (None, unknown) if unknown else self.parse_known_args(words)
        )  # before what is required
        if rest:
            raise ConfigError(unknown_name("flag", rest[0], [*self.flags, *also]))
        return known

    @property
    def flags(self) -> list[str]:
        return [word for word in self._option_string_actions if word.startswith("--")]

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(message)


@contextmanager
def answering(prefix: str) -> Iterator[None]:
    """Wrong input is answered with one sentence on stderr and exit code 2. Also decorates the `main` of a program."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"{prefix}{error}", file=sys.stderr)
        sys.exit(WRONG_INPUT)


def answer_early(module: str, parse_arguments: Callable[[None], Any]) -> None:
    """If `module` is the program, and its imports take seconds: answer --help and wrong flags before them."""
    if module == "__main__":
        with answering(f"{Path(sys.argv[0]).name}: "):
            parse_arguments(None)


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The description as written; the default of each flag that has one to show."""

    def _get_help_string(self, action: argparse.Action) -> str:
        hidden = action.default in (None, False, "", [], argparse.SUPPRESS)
        return (action.help or "") if hidden else (super()._get_help_string(action) or "")
