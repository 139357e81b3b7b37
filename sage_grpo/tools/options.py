"""Command-line parser of the tools. It rejects out-of-range values before anything heavy is imported."""

import argparse
from collections.abc import Collection, Sequence
from typing import Any

from sage_grpo.config.command_line import Parser
from sage_grpo.config.fields import MAX_NUMBER, Config, ConfigError
from sage_grpo.config.parse import parse
from sage_grpo.files.paths import shown


class ToolParser(Parser):
    """A `Parser` whose numeric flags may have a lower limit.

    parser = ToolParser("python -m sage_grpo.tools.NAME", __doc__)
    parser.add_argument("--clips", type=int, metavar="N", default=4, above=1, help="clips per prompt")
    """

    def __init__(self, program: str, about: str | None) -> None:
        self.lower_limits: dict[str, float] = {}
        super().__init__(program, about or "")

    def add_argument(
        self, *names: str, above: float | None = None, **options: Any
    ) -> argparse.Action:
        """Add an argument as argparse does; its value must be greater than `above`, if that is given."""
        action = super().add_argument(*names, **options)
        if above is not None:
            self.lower_limits[action.dest] = above
        return action

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        known, rest = super().parse_known_args(args, namespace)
        for name, limit in self.lower_limits.items():
            value = getattr(known, name)
            # written so that NaN is rejected too
            if value is not None and not limit < value <= MAX_NUMBER:
                raise ConfigError(
                    f"{name} is {shown(str(value))}; it must be above {limit}, at most {MAX_NUMBER}"
                )
        return known, rest

    def parse_with_config(
        self, args: Sequence[str] | None, not_from_file: Collection[str] = ()
    ) -> tuple[argparse.Namespace, Config]:
        """Parse the tool's own flags, and all others as flags of post_train.py, except some in a configuration file."""
        known, rest = self.parse_known_args(args)
        return known, parse(rest, self.flags, not_from_file)
