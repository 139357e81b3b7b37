"""The tools' own flags, which templates/flags.toml lists: a wrong one is answered before anything heavy is imported."""

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sage_grpo.config.command_line import Parser
from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.config.parse import parse

TYPES = {"path": Path, "int": int, "float": float}
FLAGS = tomllib.loads(Path(__file__).with_name("templates").joinpath("flags.toml").read_text())


class ToolParser(Parser):
    """The flags of a tool, with their limits."""

    def __init__(
        self, tool: str, about: str | None, program: str = "python -m sage_grpo.tools.{}"
    ) -> None:
        super().__init__(program.format(tool), about)
        self.limits = {name: flag["above"] for name, flag in FLAGS[tool].items() if "above" in flag}
        for name, flag in FLAGS[tool].items():
            kind = {"type": TYPES[flag["type"]]} if "type" in flag else {}
            own = {key: flag[key] for key in flag if key not in ("above", "positional")}
            self.add_argument(name if flag.get("positional") else f"--{name}", **own | kind)

    def parse_known_args(self, *arguments: Any) -> tuple[argparse.Namespace, list[str]]:
        known, rest = super().parse_known_args(*arguments)
        for name, limit in self.limits.items():
            value = getattr(known, name)
            if value is not None and not value > limit:  # nor may it be NaN
                raise ConfigError(f"{name} is {value}; it must be above {limit}")
        return known, rest

    def parse_with_config(self, args: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
        """This program's own flags, and all others as those of post_train.py."""
        known, rest = self.parse_known_args(args)
        return known, parse(rest, self.flags)
