"""The settings of runs, as their folders hold them."""

from collections.abc import Mapping
from typing import Any

import yaml

from sage_grpo.config.fields import Config
from sage_grpo.config.yaml_files import yaml_mapping
from sage_grpo.runs.history import RunHistory

DEFAULTS = yaml.safe_load(Config().to_yaml())


def text_of(run: RunHistory, name: str) -> str:
    """A text file of a run folder; empty if it is missing."""
    file = run.folder / name
    return file.read_text("utf-8", "replace").strip() if file.is_file() else ""


def config_of(run: RunHistory) -> dict[str, Any]:
    """The settings of a run; those that its version did not know yet are today's defaults."""
    text = text_of(run, "config.yaml")
    return DEFAULTS | yaml_mapping(text, "config.yaml") if text else {}


def differing(configs: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The settings that differ, one row each: name, then its value in every run, a dash where it has none."""
    names = dict.fromkeys(name for config in configs.values() for name in config)
    rows = []
    for name in names:
        values = [str(config.get(name, "–")) for config in configs.values()]
        if name != "output_dir" and len(set(values)) > 1:
            rows.append([str(name), *values])
    return rows
