"""Writes the tiny model in Tencent's layout: the same numbers, with Tencent's tensor and file names."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from sage_grpo.models.hunyuan15.folder import ModelFolder
from scripts import convert_weights
from scripts.export_checkpoint import save_tencent

COLORS = {"white": 0, "red": 1, "blue": 2}
FONTS = {"en-Arial": 0, "cn-Song": 0, "en-Times": 1}


def write_tencent_folder(tiny, folder, version="480p_t2v"):
    """Write the model of `tiny`, a folder in the layout of diffusers, to `folder`."""
    _write_transformer(tiny, folder / "transformer" / version)
    _write_vae(tiny, folder / "vae")
    _write_llm(tiny, folder / "text_encoder" / "llm")
    _write_glyph(tiny, folder / "text_encoder")
    shutil.copy(tiny / "sampling.json", folder)
    for part in ("image_encoder", "feature_extractor"):
        if (tiny / part).is_dir():
            shutil.copytree(tiny / part, folder / "vision_encoder" / "siglip" / part)
    convert_weights.main([str(folder)])
    return folder


def _config(path):
    return json.loads((path / "config.json").read_text())


def _write_transformer(tiny, folder):
    save_tencent(folder, "transformer", ModelFolder(tiny).weights("transformer"))
    c = _config(tiny / "transformer")
    config = {
        "patch_size": [c["patch_size_t"], c["patch_size"], c["patch_size"]],
        "in_channels": c["out_channels"],
        "concat_condition": True,
        "out_channels": c["out_channels"],
        "hidden_size": c["num_attention_heads"] * c["attention_head_dim"],
        "heads_num": c["num_attention_heads"],
        "mlp_width_ratio": c["mlp_ratio"],
        "mm_double_blocks_depth": c["num_layers"],
        "mm_single_blocks_depth": 0,
        "rope_dim_list": c["rope_axes_dim"],
        "rope_theta": 256,
        "text_states_dim": c["text_embed_dim"],
        "text_states_dim_2": None,
        "byt5_states_dim": c["text_embed_2_dim"],
        "vision_states_dim": c["image_embed_dim"],
        "use_meanflow": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


def _write_vae(tiny, folder):
    save_tencent(folder, "vae", ModelFolder(tiny).weights("vae"))
    settings = _config(tiny / "vae").items()
    config = {name: value for name, value in settings if not name.startswith("_")}
    config["ffactor_spatial"] = config.pop("spatial_compression_ratio")
    config["ffactor_temporal"] = config.pop("temporal_compression_ratio")
    config["sample_size"] = 256
    config["shift_factor"] = None
    (folder / "config.json").write_text(json.dumps(config))


def _write_llm(tiny, folder):
    """A whole Qwen2.5-VL with the names and the flat config of the published one."""
    shutil.copytree(tiny / "tokenizer", folder)
    text = load_file(tiny / "text_encoder" / "model.safetensors")
    tensors = {f"model.{name}": tensor for name, tensor in text.items()}
    tensors["visual.patch_embed.proj.weight"] = torch.zeros(2, 2)
    tensors["lm_head.weight"] = torch.zeros(2, 2)
    save_file(tensors, folder / "model.safetensors")

    config = _config(tiny / "text_encoder")
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config["model_type"] = "qwen2_5_vl"
    config["vision_config"] = {"depth": 32}
    (folder / "config.json").write_text(json.dumps(config))


def _write_glyph(tiny, folder):
    shutil.copytree(tiny / "tokenizer_2", folder / "byt5-small")
    shutil.copy(tiny / "text_encoder_2" / "config.json", folder / "byt5-small")
    glyph = folder / "Glyph-SDXL-v2"
    for part in ("assets", "checkpoints"):
        (glyph / part).mkdir(parents=True)
    (glyph / "assets" / "color_idx.json").write_text(json.dumps(COLORS))
    (glyph / "assets" / "multilingual_10-lang_idx.json").write_text(json.dumps(FONTS))
    tensors = load_file(tiny / "text_encoder_2" / "model.safetensors")
    table = tensors.pop("shared.weight")
    tensors = {name.removeprefix("encoder."): tensor for name, tensor in tensors.items()}
    added = torch.ones(len(COLORS) + len(FONTS), table.shape[1])
    tensors["embed_tokens.weight"] = torch.cat([table, added])
    state = {f"module.text_tower.encoder.{name}": tensor for name, tensor in tensors.items()}
    state["module.visual.weight"] = torch.zeros(2)
    torch.save({"epoch": 3, "state_dict": state}, glyph / "checkpoints" / "byt5_model.pt")
