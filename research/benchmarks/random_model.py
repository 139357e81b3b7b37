"""Write a model folder with the full HunyuanVideo-1.5 architecture and random weights, for benchmarks only.

    python -m research.benchmarks.random_model --output /tmp/random_model \\
        [--layers 54] [--encoders] [--reward] [--device cuda]

Transformer (8.3 B parameters) and VAE are full size. The text encoders have the real widths but three layers, because
they are used once per prompt and then leave the device; `--encoders` makes them Qwen2.5-VL 7B and ByT5. `--reward` adds
VideoAlign, on Qwen2-VL 2B. `--tiny` makes all parts small, to try things out on a CPU.
"""

import argparse
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from torch import nn
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    T5Config,
    T5EncoderModel,
)

from research.benchmarks.random_reward import write_reward
from research.benchmarks.random_weights import Writer
from research.tiny.tiny import build_tiny, build_tokenizer
from sage_grpo.models.backbone import Sampling

PROMPTS = Path(__file__).parents[2] / "assets" / "prompts"
TEXT = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}  # fmt: skip
GLYPH = {
    "vocab_size": 1510,  # of ByT5 and of the Glyph-SDXL-v2 colors and fonts
    "d_model": 1472, "d_kv": 64, "d_ff": 3584, "num_layers": 12, "num_heads": 6, "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": False, "tie_word_embeddings": False,
}  # fmt: skip
TINY_SAMPLING = Sampling(frames=5, height=16, width=16, fps=8, shift=5.0, guidance=6.0, num_steps=2)

Part = tuple[nn.Module, str]  # a module on the meta device, and its config.json


def full_parts(layers: int | None, encoders: bool, tokens: int) -> dict[str, Part]:
    """The parts of the published model; without `encoders`, text encoders of the real widths but few layers.

    tokens: size of the vocabulary of the small text encoder.
    """
    text = dict(TEXT)
    glyph = dict(GLYPH)
    if not encoders:
        no_token_ids = {"bos_token_id": None, "eos_token_id": None}
        text |= {"num_hidden_layers": 3, "vocab_size": tokens, **no_token_ids}
        glyph |= {"num_layers": 2}
    with torch.device("meta"):
        transformer = HunyuanVideo15Transformer3DModel(num_layers=layers or 54, task_type="t2v")
        vae = AutoencoderKLHunyuanVideo15()
        text_encoder = Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**text))
        glyph_encoder = T5EncoderModel(T5Config(**glyph))
    return {
        "transformer": (transformer, transformer.to_json_string()),
        "vae": (vae, vae.to_json_string()),
        "text_encoder": (text_encoder, text_encoder.config.to_json_string()),
        "text_encoder_2": (glyph_encoder, glyph_encoder.config.to_json_string()),
    }


def tiny_parts(layers: int | None, words: Sequence[str]) -> dict[str, Part]:
    """The parts of an embedded model."""
    pipe = build_tiny(0, words)
    config = dict(pipe.transformer.config) | {"num_layers": layers or 2}
    transformer = HunyuanVideo15Transformer3DModel.from_config(config)
    return {
        "transformer": (transformer, transformer.to_json_string()),
        "vae": (pipe.vae, pipe.vae.to_json_string()),
        "text_encoder": (pipe.text_encoder, pipe.text_encoder.config.to_json_string()),
        "text_encoder_2": (pipe.text_encoder_2, pipe.text_encoder_2.config.to_json_string()),
    }


def prompt_words() -> list[str]:
    """The words of the bundled prompts: each becomes one token, as most are with the published tokenizer."""
    text = " ".join(path.read_text() for path in sorted(PROMPTS.glob("*.csv")))
    return sorted({"a", "the", *re.findall(r"[A-Za-z]+", text)})


def write_model(
    output: Path, parts: Mapping[str, Part], words: Iterable[str], writer: Writer
) -> dict[str, int]:
    """Begin to write all parts in the layout of diffusers; returns their numbers of parameters."""
    tokenizer = build_tokenizer(list(words))
    tokenizer.save_pretrained(output / "tokenizer")
    ByT5Tokenizer().save_pretrained(output / "tokenizer_2")
    return {
        name: writer.model(output / name, module, config)
        for name, (module, config) in parts.items()
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--layers", type=int, help="transformer blocks (default: 54)")
    parser.add_argument("--encoders", action="store_true", help="text encoders at full size")
    parser.add_argument("--reward", action="store_true", help="add VideoAlign")
    parser.add_argument("--tiny", action="store_true", help="make all parts small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    begin = time.perf_counter()
    writer = Writer(torch.device(options.device))
    words = prompt_words()
    options.output.mkdir(parents=True)
    if options.tiny:
        parts = tiny_parts(options.layers, words)
        TINY_SAMPLING.to_json(options.output / "sampling.json")
    else:
        parts = full_parts(options.layers, options.encoders, len(build_tokenizer(words)))
    counts = write_model(options.output, parts, words, writer)
    if options.reward:
        reward_folder = options.output / "VideoReward"
        counts["VideoReward"] = write_reward(reward_folder, options.tiny, words, writer)
    writer.finish()
    # Written last: a folder with this file is complete.
    (options.output / "model_index.json").write_text('{"_class_name": "HunyuanVideo15Pipeline"}\n')

    gigabytes = sum(path.stat().st_size for path in options.output.rglob("*.safetensors")) / 1e9
    sizes = ", ".join(f"{name} {count / 1e6:,.1f} M" for name, count in counts.items())
    seconds = time.perf_counter() - begin
    print(f"{options.output}: {sizes} parameters; {gigabytes:.1f} GB in {seconds:.0f} s")


if __name__ == "__main__":
    main()
