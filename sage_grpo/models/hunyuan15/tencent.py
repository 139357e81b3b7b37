"""Tencent's HunyuanVideo-1.5 layout: maps its tensor and setting names to those of diffusers.

The rules in tencent_names.txt work in both directions. All tensors are simply renamed, with two exceptions: Tencent
stacks query, key and value of the text refiner in one tensor, and its last modulation has shift before scale.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sage_grpo.models.names import read_rules, translate
from sage_grpo.models.weights import Rows

# Names of settings in Tencent's config.json, and in that of diffusers.
SETTINGS = {
    "transformer": {
        "out_channels": "out_channels",
        "heads_num": "num_attention_heads",
        "mm_double_blocks_depth": "num_layers",
        "mlp_width_ratio": "mlp_ratio",
        "text_states_dim": "text_embed_dim",
        "byt5_states_dim": "text_embed_2_dim",
        "vision_states_dim": "image_embed_dim",
        "rope_theta": "rope_theta",
        "rope_dim_list": "rope_axes_dim",
        "use_meanflow": "use_meanflow",
    },
    "vae": {
        "in_channels": "in_channels",
        "out_channels": "out_channels",
        "latent_channels": "latent_channels",
        "block_out_channels": "block_out_channels",
        "layers_per_block": "layers_per_block",
        "downsample_match_channel": "downsample_match_channel",
        "upsample_match_channel": "upsample_match_channel",
        "scaling_factor": "scaling_factor",
        "ffactor_spatial": "spatial_compression_ratio",
        "ffactor_temporal": "temporal_compression_ratio",
    },
}

TARGET_SIZES = {"480p": 640, "720p": 960}  # the transformer's `target_size`


RULES = read_rules(Path(__file__).with_name("tencent_names.txt"))


def to_diffusers(part: str, names: Iterable[str]) -> dict[str, tuple[Rows, ...]]:
    """The Tencent rows that make up each diffusers tensor; names without a rule are kept."""
    recipes: dict[str, tuple[Rows, ...]] = {}
    for name in names:
        has_rule = False
        for rule in RULES[part]:
            new_name = translate(name, rule.original, rule.diffusers)
            if new_name is not None:
                has_rule = True
                recipes[new_name] = tuple(Rows(name, n, rule.num_blocks) for n in rule.blocks)
        if not has_rule:
            recipes[name] = (Rows(name, 0, 1),)
    return recipes


def read_version(name: str) -> tuple[int, str, bool]:
    """Target size, task and whether it is distilled, from a folder name such as 480p_t2v or 720p_i2v_distilled."""
    match = re.fullmatch(r"(480p|720p)_(t2v|i2v)((?:_cfg|_step)?_distilled)?", name)
    if not match:
        known = "480p_t2v, 480p_i2v, 720p_t2v, 720p_i2v, or one of these followed by _distilled"
        raise ValueError(f"pretrained_transformer_version is {name}; it must be {known}.")
    resolution, task, distilled = match.groups()
    return TARGET_SIZES[resolution], task, distilled is not None


def diffusers_config(part: str, config: dict[str, Any], version: str) -> dict[str, Any]:
    """Arguments for diffusers' transformer or VAE; settings missing from Tencent's config take diffusers' defaults."""
    values = {
        diffusers: config[tencent]
        for tencent, diffusers in SETTINGS[part].items()
        if config.get(tencent) is not None
    }
    if part == "vae":
        return values

    if "in_channels" in config:
        # Tencent counts the latent channels; diffusers adds those of the condition, and its mask.
        values["in_channels"] = config["in_channels"]
        if config.get("concat_condition", True):
            values["in_channels"] = 2 * config["in_channels"] + 1
    if "hidden_size" in config and "heads_num" in config:
        values["attention_head_dim"] = config["hidden_size"] // config["heads_num"]
    if "patch_size" in config:
        values["patch_size_t"], values["patch_size"], _ = config["patch_size"]
    values["target_size"], values["task_type"], _ = read_version(version)
    return values
