"""Tencent's HunyuanVideo-1.5 layout: maps its tensor and setting names to those of diffusers.

The rules in tencent_names.txt work in both directions; it also lists settings and folders. All tensors are simply
renamed, with two exceptions: Tencent stacks query, key and value of the text refiner in one tensor, and its last
modulation has shift before scale.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from sage_grpo.models.weights import Rows


class Rule(NamedTuple):
    """Maps a Tencent tensor, split into `of` equal blocks of rows, to a diffusers tensor: its `blocks`, in order."""

    tencent: str
    diffusers: str
    blocks: tuple[int, ...] = (0,)
    of: int = 1


def _read_rules() -> dict[str, list[Rule]]:
    rules: dict[str, list[Rule]] = {}
    for line in Path(__file__).with_name("tencent_names.txt").read_text().splitlines():
        if line.startswith("["):
            rules[line[1:-1]] = found = []
        elif line and not line.startswith("# "):
            tencent, diffusers, *stacked = line.split()
            blocks, _, of = (stacked or ["0/1"])[0].partition("/")
            found.append(Rule(tencent, diffusers, tuple(map(int, blocks.split(","))), int(of)))
    return rules


RULES = _read_rules()


def to_diffusers(part: str, names: Iterable[str]) -> dict[str, tuple[Rows, ...]]:
    """The Tencent rows that make up each diffusers tensor; names without a rule are kept."""
    recipes: dict[str, tuple[Rows, ...]] = {}
    for name in names:
        known = [
            (rule, new)
            for rule in RULES[part]
            if (new := translate(name, rule.tencent, rule.diffusers))
        ]
        known = known or [(Rule(name, name), name)]
        recipes |= {
            new: tuple((name, block, rule.of) for block in rule.blocks) for rule, new in known
        }
    return recipes


def translate(name: str, pattern: str, template: str) -> str | None:
    match = re.match(re.escape(pattern).replace(r"\#", r"(\d+)") + r"(?=\.)", name)
    if not match:
        return None
    numbers = iter(match.groups())
    return re.sub("#", lambda _: next(numbers), template) + name[match.end() :]


def read_version(name: str) -> tuple[int, str, bool]:
    """Target size, task and whether it is distilled, from a folder name such as 480p_t2v or 720p_i2v_distilled."""
    match = re.fullmatch(r"(480p|720p)_(t2v|i2v)((?:_cfg|_step)?_distilled)?", name)
    if not match:
        known = "480p_t2v, 480p_i2v, 720p_t2v, 720p_i2v, or one of these with _distilled behind it"
        raise ValueError(f"pretrained_transformer_version is {name}; it must be {known}.")
    return {"480p": 640, "720p": 960}[match[1]], match[2], match[3] is not None


def diffusers_config(part: str, config: dict[str, Any], version: str) -> dict[str, Any]:
    """Arguments for diffusers' transformer or VAE; settings missing from Tencent's config take diffusers' defaults."""
    known = [rule for rule in RULES[f"{part} settings"] if config.get(rule.tencent) is not None]
    values = {rule.diffusers: config[rule.tencent] for rule in known}
    if part == "vae":
        return values
    if (
        "in_channels" in config
    ):  # Tencent counts only the latent; diffusers adds the condition and its mask
        concatenated = config.get("concat_condition", True)
        values["in_channels"] = (
            2 * config["in_channels"] + 1 if concatenated else config["in_channels"]
        )
    if "hidden_size" in config and "heads_num" in config:
        values["attention_head_dim"] = config["hidden_size"] // config["heads_num"]
    if "patch_size" in config:
        values["patch_size_t"], values["patch_size"], _ = config["patch_size"]
    target, task, _ = read_version(version)
    return values | {"target_size": target, "task_type": task}
