"""Write a Wan folder with random weights: the architecture of a published model, or a tiny one for the CPU.

Transformers and VAE are full size: 1.42 B parameters for Wan 2.1 1.3B, 5.0 B for Wan 2.2 TI2V 5B, twice 14.3 B for Wan
2.2 A14B, whose second transformer shares the files of the first. The text encoder has the real widths but two layers,
because it is used once per prompt and then leaves the device.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import (
    AutoencoderKLWan,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from torch import nn
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

from research.benchmarks.random_weights import Writer
from sage_grpo.files.json_files import write_json
from sage_grpo.models.backbone import Sampling
from sage_grpo.models.wan.folder import A14B_I2V_TRANSFORMER, SMALL, TI2V_TRANSFORMER, TI2V_VAE

TINY_SAMPLING = Sampling(
    frames=9, height=32, width=32, fps=8, shift=3.0, guidance=5.0, num_steps=20
)
TINY_TRANSFORMER = {
    "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 24,
    "freq_dim": 32, "ffn_dim": 80, "num_layers": 2, "rope_max_seq_len": 64,
}  # fmt: skip
TINY_VAE = {  # statistics far from 0 and 1, so that a missing or doubled normalization shows
    "base_dim": 4, "z_dim": 4, "num_res_blocks": 1, "latents_mean": [0.5, -1.0, 0.1, 2.0],
    "latents_std": [0.4, 2.0, 1.5, 0.7],
}  # fmt: skip
TINY_TI2V_VAE = {
    "base_dim": 4, "decoder_base_dim": 8, "z_dim": 4, "num_res_blocks": 1, "in_channels": 12, "out_channels": 12,
    "patch_size": 2, "is_residual": True, "scale_factor_spatial": 16, "latents_mean": [0.5, -1.0, 0.1, 2.0],
    "latents_std": [0.4, 2.0, 1.5, 0.7],
}  # fmt: skip
TINY_TEXT = {"d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 3}
TEXT = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 2, "num_heads": 64}


class Model(NamedTuple):
    """Settings of a model's parts, at full size and tiny, and what its model_index.json says besides the parts."""

    transformer: dict[str, Any]
    vae: dict[str, Any]
    tiny_vae: dict[str, Any]
    settings: dict[str, Any]
    pipeline: type[DiffusionPipeline] = WanPipeline
    tiny_transformer: dict[str, Any] = TINY_TRANSFORMER
    transformers: tuple[str, ...] = ("transformer",)  # folders


MODELS = {
    "wan21-1.3b": Model(SMALL, {}, TINY_VAE, {}),
    "wan22-ti2v-5b": Model(TI2V_TRANSFORMER, TI2V_VAE, TINY_TI2V_VAE, {"expand_timesteps": True}),
    "wan22-t2v-a14b": Model(
        {}, {}, TINY_VAE, {"boundary_ratio": 0.875}, transformers=("transformer", "transformer_2")
    ),
    "wan22-i2v-a14b": Model(
        A14B_I2V_TRANSFORMER,
        {},
        TINY_VAE,
        {"boundary_ratio": 0.9},
        WanImageToVideoPipeline,
        # latents, four masks and the latents of the image
        TINY_TRANSFORMER | {"in_channels": 12},
        ("transformer", "transformer_2"),
    ),
}


def tokenizer_of(words: Sequence[str]) -> T5TokenizerFast:
    """A tokenizer of these words, and of single letters for all others."""
    pieces = list(dict.fromkeys(["<pad>", "</s>", "<unk>", "▁", *(f"▁{word}" for word in words)]))
    letters = [chr(code) for code in range(33, 127) if chr(code) not in pieces]
    scores = [0.0, 0.0, 0.0, -3.0, *[-1.0] * (len(pieces) - 4), *[-5.0] * len(letters)]
    return T5TokenizerFast(vocab=list(zip([*pieces, *letters], scores, strict=True)), extra_ids=0)


def parts_of(model: Model, tiny: bool, tokens: int) -> dict[str, nn.Module]:
    """Transformers, VAE and text encoder, on the current device."""
    text = TINY_TEXT if tiny else TEXT
    kind = {
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
        "tie_word_embeddings": False,
    }
    sizes = model.tiny_transformer if tiny else model.transformer
    return {
        **{folder: WanTransformer3DModel(**sizes) for folder in model.transformers},
        "vae": AutoencoderKLWan(**(model.tiny_vae if tiny else model.vae)),
        "text_encoder": UMT5EncoderModel(UMT5Config(vocab_size=tokens, **text, **kind)),
    }


def build_tiny_wan(seed: int, words: Sequence[str], name: str = "wan21-1.3b") -> DiffusionPipeline:
    """The stock pipeline around untrained tiny components of a model of MODELS, in fp32."""
    model = MODELS[name]
    tokenizer = tokenizer_of(words)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        parts = {name: part.eval() for name, part in parts_of(model, True, len(tokenizer)).items()}
        nn.init.normal_(parts["text_encoder"].shared.weight)
        # No norm weight stays at 1, where a swap of two would not show.
        for folder in model.transformers:
            for parameter in parts[folder].parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return model.pipeline(**parts, tokenizer=tokenizer, scheduler=scheduler, **model.settings)


def write_wan(
    folder: Path, tiny: bool, words: Sequence[str], writer: Writer, name: str = "wan21-1.3b"
) -> None:
    """Begin to write a folder. When `writer` is finished, `link_experts` and `write_index` complete it."""
    tokenizer = tokenizer_of(words)
    tokenizer.save_pretrained(folder / "tokenizer")
    model = MODELS[name]
    with torch.device("meta"):
        parts = parts_of(model, tiny, len(tokenizer))
    for part_name, part in parts.items():
        if part_name in model.transformers[1:]:
            continue
        is_stock = part_name == "text_encoder"
        config = part.config.to_json_string() if is_stock else part.to_json_string()
        writer.model(folder / part_name, part, config)
    if tiny:
        TINY_SAMPLING.to_json(folder / "sampling.json")


def link_experts(folder: Path, name: str) -> None:
    """Give the second transformer, if there is one, the files of the first.

    Speed does not depend on values, and half of the tens of gigabytes need not be written.
    """
    first, *others = MODELS[name].transformers
    for other in others:
        (folder / other).mkdir(exist_ok=True)
        for file in (folder / first).iterdir():
            link = folder / other / file.name
            link.unlink(missing_ok=True)  # of a call that was stopped
            os.link(file, link)


def write_index(folder: Path, name: str = "wan21-1.3b") -> None:
    """Write `model_index.json`: a folder with this file is complete."""
    model = MODELS[name]
    index = {"_class_name": model.pipeline.__name__, **model.settings}
    write_json(folder / "model_index.json", index)
