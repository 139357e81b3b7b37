"""The settings of runs, as their folders hold them."""

from collections.abc import Mapping
from typing import Any

import yaml

from sage_grpo.config.fields import Config
from sage_grpo.config.yaml_files import yaml_mapping
from sage_grpo.runs.history import RunHistory, text_of

DEFAULTS = yaml.safe_load(Config().to_yaml())
# prefix of names -> the setting, and the value of it, without which they have no effect
NEEDED = {
    "lora_": ("use_lora", True),
    "nft_": ("algorithm", "nft"),
}
# how a run is started, not what it does
HANDLING = ("overwrite",)


def has_meaning(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a setting has an effect on a run of this configuration."""
    if name in HANDLING:
        return False
    for beginning, (setting, value) in NEEDED.items():
        if name.startswith(beginning) and config.get(setting) != value:
            return False
    return True


def config_of(run: RunHistory) -> dict[str, Any]:
    """The settings of a run; those unknown to its version have today's defaults."""
    file = run.folder / "config.yaml"
    text = text_of(file).strip()
    return DEFAULTS | yaml_mapping(text, str(file)) if text else {}


def differing(configs: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The settings that differ, one row each: name, then its value in every run, a dash where it has none."""
    names = dict.fromkeys(name for config in configs.values() for name in config)
    rows = []
    for name in names:
        values = [str(config.get(name, "–")) for config in configs.values()]
        if name != "output_dir" and len(set(values)) > 1:
            rows.append([str(name), *values])
    return rows
