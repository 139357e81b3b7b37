"""Tencent's HunyuanVideo-1.5 layout: maps its tensor and setting names to those of diffusers.

The tables work in both directions. Rules match name prefixes: `#` stands for a number, and the suffix after the match
(`.weight`, `.bias`, `.gamma`) is kept. All tensors are simply renamed, with two exceptions: Tencent stacks query, key
and value of the text refiner in one tensor, and its last modulation has shift before scale.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from sage_grpo.models.weights import Rows


class Rule(NamedTuple):
    """Maps a Tencent tensor, split into `of` equal blocks of rows, to a diffusers tensor: its `blocks`, in order."""

    tencent: str
    diffusers: str
    blocks: tuple[int, ...] = (0,)
    of: int = 1


def _under(tencent: str, diffusers: str, *rules: tuple) -> list[Rule]:
    return [Rule(f"{tencent}.{rule[0]}", f"{diffusers}.{rule[1]}", *rule[2:]) for rule in rules]


TRANSFORMER = [
    Rule("time_in.mlp.0", "time_embed.timestep_embedder.linear_1"),
    Rule("time_in.mlp.2", "time_embed.timestep_embedder.linear_2"),
    Rule("time_r_in.mlp.0", "time_embed.timestep_embedder_r.linear_1"),
    Rule("time_r_in.mlp.2", "time_embed.timestep_embedder_r.linear_2"),
    Rule("txt_in.t_embedder.mlp.0", "context_embedder.time_text_embed.timestep_embedder.linear_1"),
    Rule("txt_in.t_embedder.mlp.2", "context_embedder.time_text_embed.timestep_embedder.linear_2"),
    Rule("txt_in.c_embedder", "context_embedder.time_text_embed.text_embedder"),
    Rule("txt_in.input_embedder", "context_embedder.proj_in"),
    *_under(
        "txt_in.individual_token_refiner.blocks.#",
        "context_embedder.token_refiner.refiner_blocks.#",
        ("norm1", "norm1"),
        ("norm2", "norm2"),
        ("self_attn_qkv", "attn.to_q", (0,), 3),
        ("self_attn_qkv", "attn.to_k", (1,), 3),
        ("self_attn_qkv", "attn.to_v", (2,), 3),
        ("self_attn_proj", "attn.to_out.0"),
        ("mlp.fc1", "ff.net.0.proj"),
        ("mlp.fc2", "ff.net.2"),
        ("adaLN_modulation.1", "norm_out.linear"),
    ),
    Rule("byt5_in.layernorm", "context_embedder_2.norm"),
    Rule("byt5_in.fc1", "context_embedder_2.linear_1"),
    Rule("byt5_in.fc2", "context_embedder_2.linear_2"),
    Rule("byt5_in.fc3", "context_embedder_2.linear_3"),
    Rule("vision_in.proj.0", "image_embedder.norm_in"),
    Rule("vision_in.proj.1", "image_embedder.linear_1"),
    Rule("vision_in.proj.3", "image_embedder.linear_2"),
    Rule("vision_in.proj.4", "image_embedder.norm_out"),
    Rule("img_in.proj", "x_embedder.proj"),
    Rule("cond_type_embedding", "cond_type_embed"),
    *_under(
        "double_blocks.#",
        "transformer_blocks.#",
        ("img_mod.linear", "norm1.linear"),
        ("img_attn_q", "attn.to_q"),
        ("img_attn_k", "attn.to_k"),
        ("img_attn_v", "attn.to_v"),
        ("img_attn_q_norm", "attn.norm_q"),
        ("img_attn_k_norm", "attn.norm_k"),
        ("img_attn_proj", "attn.to_out.0"),
        ("img_mlp.fc1", "ff.net.0.proj"),
        ("img_mlp.fc2", "ff.net.2"),
        ("txt_mod.linear", "norm1_context.linear"),
        ("txt_attn_q", "attn.add_q_proj"),
        ("txt_attn_k", "attn.add_k_proj"),
        ("txt_attn_v", "attn.add_v_proj"),
        ("txt_attn_q_norm", "attn.norm_added_q"),
        ("txt_attn_k_norm", "attn.norm_added_k"),
        ("txt_attn_proj", "attn.to_add_out"),
        ("txt_mlp.fc1", "ff_context.net.0.proj"),
        ("txt_mlp.fc2", "ff_context.net.2"),
    ),
    Rule("final_layer.adaLN_modulation.1", "norm_out.linear", (1, 0), 2),
    Rule("final_layer.linear", "proj_out"),
]

VAE = [
    rule
    for half in ("encoder", "decoder")
    for rule in _under(
        half,
        half,
        *((same, same) for same in ("conv_in", "norm_out", "conv_out")),
        ("mid.block_1", "mid_block.resnets.0"),
        ("mid.block_2", "mid_block.resnets.1"),
        ("mid.attn_1.norm", "mid_block.attentions.0.norm"),
        ("mid.attn_1.q", "mid_block.attentions.0.to_q"),
        ("mid.attn_1.k", "mid_block.attentions.0.to_k"),
        ("mid.attn_1.v", "mid_block.attentions.0.to_v"),
        ("mid.attn_1.proj_out", "mid_block.attentions.0.proj_out"),
        ("down.#.block.#", "down_blocks.#.resnets.#"),
        ("down.#.downsample", "down_blocks.#.downsamplers.0"),
        ("up.#.block.#", "up_blocks.#.resnets.#"),
        ("up.#.upsample", "up_blocks.#.upsamplers.0"),
    )
]

RULES = {"transformer": TRANSFORMER, "vae": VAE}


def to_diffusers(part: str, names: Iterable[str]) -> dict[str, tuple[Rows, ...]]:
    """The Tencent rows that make up each diffusers tensor; names without a rule are kept."""
    recipes: dict[str, tuple[Rows, ...]] = {}
    for name in names:
        known = [(rule, new) for rule in RULES[part] if (new := translate(name, rule.tencent, rule.diffusers))]
        recipes |= {new: tuple(Rows(name, block, rule.of) for block in rule.blocks) for rule, new in known}
        if not known:
            recipes[name] = (Rows(name),)
    return recipes


def translate(name: str, pattern: str, template: str) -> str | None:
    match = re.match(re.escape(pattern).replace(r"\#", r"(\d+)") + r"(?=\.)", name)
    if not match:
        return None
    numbers = iter(match.groups())
    return re.sub("#", lambda _: next(numbers), template) + name[match.end() :]


class Version(NamedTuple):
    """Properties encoded in the name of a transformer folder."""

    target_size: int
    task_type: str
    distilled: bool


def read_version(name: str) -> Version:
    """Parse a folder name: 480p_t2v, 720p_t2v_distilled, 480p_t2v_cfg_distilled and so on."""
    match = re.fullmatch(r"(480p|720p)_(t2v|i2v)((?:_cfg|_step)?_distilled)?", name)
    if not match:
        raise ValueError(
            f"pretrained_transformer_version {name} cannot be sampled by this code; "
            "it must be 480p_t2v, 720p_t2v, or one of these with _distilled behind it."
        )
    return Version({"480p": 640, "720p": 960}[match[1]], match[2], match[3] is not None)


SETTINGS = {
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
}


def transformer_config(config: dict[str, Any], version: str) -> dict[str, Any]:
    """Arguments for diffusers' transformer; settings missing from Tencent's config take diffusers' defaults."""
    values = {new: config[old] for old, new in SETTINGS.items() if config.get(old) is not None}
    if "in_channels" in config:  # Tencent counts only the latent; diffusers adds the condition and its mask
        concatenated = config.get("concat_condition", True)
        values["in_channels"] = 2 * config["in_channels"] + 1 if concatenated else config["in_channels"]
    if "hidden_size" in config and "heads_num" in config:
        values["attention_head_dim"] = config["hidden_size"] // config["heads_num"]
    if "patch_size" in config:
        values["patch_size_t"], values["patch_size"], _ = config["patch_size"]
    size, task, _ = read_version(version)
    return values | {"target_size": size, "task_type": task}


def vae_config(config: dict[str, Any]) -> dict[str, Any]:
    """Arguments for diffusers' VAE; settings missing from Tencent's config take diffusers' defaults."""
    same = ("in_channels", "out_channels", "latent_channels", "block_out_channels", "layers_per_block")
    same += ("downsample_match_channel", "upsample_match_channel", "scaling_factor")
    names = {name: name for name in same}
    names |= {"ffactor_spatial": "spatial_compression_ratio", "ffactor_temporal": "temporal_compression_ratio"}
    return {new: config[old] for old, new in names.items() if config.get(old) is not None}
