"""The command line of every program: flags are not abbreviated, and a user error is one sentence."""

import argparse
import difflib
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sage_grpo import __version__
from sage_grpo.config.fields import ConfigError
from sage_grpo.config.other_names import flags_for
from sage_grpo.escape import terminal_text
from sage_grpo.exit_codes import WRONG_INPUT
from sage_grpo.files.paths import MAX_NAME_BYTES, MAX_PATH_BYTES, is_too_long, shown
from sage_grpo.installed import require_packages

# what wrong input raises: this package's own errors, and those of the operating system
USER_ERRORS = (ValueError, OSError)


def unknown_name(what: str, name: str, known: Sequence[str]) -> str:
    """The error for a name that is not among the `known` ones, with the one of them that was probably meant."""
    suggestions = flags_for(name, known)
    if suggestions is None:
        suggestions = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {suggestions[0]}?" if suggestions else "--help lists them all"
    return f"unknown {what} {name}; {hint}"


class Parser(argparse.ArgumentParser):
    """Accepts unabbreviated flags, with hyphens or underscores; an error is a ConfigError of one sentence."""

    instead: Mapping[str, str] = {}  # flag that users may expect -> what to use instead

    def __init__(self, program: str, about: str, **kwargs: Any) -> None:
        super().__init__(
            program,
            description=about,
            allow_abbrev=False,
            formatter_class=lambda prog: _Help(prog, max_help_position=32, width=110),
            **kwargs,
        )
        self.add_argument("--version", action="version", version=f"sage-grpo {__version__}")

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = sys.argv[1:] if args is None else args
        known, rest = super().parse_known_args(
            [_with_underscores(word) for word in words], namespace
        )
        for name, value in vars(known).items():
            for path in value if isinstance(value, list) else [value]:
                if isinstance(path, Path):
                    _check_length(name, path)
        return known, rest

    def parse_args(
        self, args: Sequence[str] | None = None, also: Sequence[str] = ()
    ) -> argparse.Namespace:
        """`also`: flags to suggest for a misspelled one, besides those of this parser."""
        words = sys.argv[1:] if args is None else args
        # unknown flags come before missing ones, which argparse would report first
        flags = [match[0] for word in words if (match := re.match(r"--[\w-]+(?==|$)", word))]
        unknown = [flag for flag in flags if _with_underscores(flag) not in self.flags]
        known = None
        if not unknown:
            known, unknown = self.parse_known_args(words)
        if unknown:
            flag = unknown[0]
            if instead := self.instead.get(_with_underscores(flag)):
                raise ConfigError(f"there is no {flag}; {instead}")
            raise ConfigError(unknown_name("flag", flag, [*self.flags, *also]))
        return known

    @property
    def flags(self) -> list[str]:
        """All flags of this parser, each with its two hyphens."""
        return [option for option in self._option_string_actions if option.startswith("--")]

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(message)


def _check_length(name: str, path: Path) -> None:
    if is_too_long(path):
        raise ConfigError(
            f"{name} is {shown(path)}; a path has at most {MAX_PATH_BYTES} bytes, "
            f"and each name in it {MAX_NAME_BYTES}"
        )


def _with_underscores(word: str) -> str:
    """A word of a command line, with underscores for the hyphens inside its flag, if it is one."""
    return re.sub(r"^--[\w-]+", lambda flag: "--" + flag[0][2:].replace("-", "_"), word)


@contextmanager
def answering(prefix: str) -> Iterator[None]:
    """Answer wrong input with one sentence on stderr and exit code 2. Also decorates the `main` of a program."""
    try:
        yield
    except USER_ERRORS as error:
        print(f"{prefix}{error_text(error)}", file=sys.stderr)
        sys.exit(WRONG_INPUT)


def error_text(error: BaseException) -> str:
    """The error in one line for a terminal; one of the operating system begins with its file."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        place = "" if error.filename is None else f"{shown(error.filename)} cannot be used: "
        text = f"{place}{error.strerror}"
    return terminal_text(text.replace("\n", " "))


def answer_early(module: str, parse_arguments: Callable[[None], Any]) -> None:
    """If `module` is the program, answer --help and wrong flags now, before imports that take seconds."""
    if module == "__main__":
        with answering(f"{Path(sys.argv[0]).name}: "):
            parse_arguments(None)
        require_packages()


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the description as written, and shows the default of each flag that has one to show."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.default in (None, False, "", [], argparse.SUPPRESS):
            return action.help or ""
        return super()._get_help_string(action) or ""
