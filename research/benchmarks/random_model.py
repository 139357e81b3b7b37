"""Write a model folder with the full HunyuanVideo-1.5 architecture and random weights, for benchmarks only.

    python -m research.benchmarks.random_model --output /tmp/random_model [--layers 54] [--encoders] [--reward] [--device cuda]

Transformer (8.3 B parameters) and VAE are full size. The text encoders have the real widths but three layers, because
they are used once per prompt and then leave the device; `--encoders` makes them Qwen2.5-VL 7B and ByT5. `--reward` adds
VideoAlign, on Qwen2-VL 2B. `--tiny` makes all parts small, to try things out on a CPU.
"""

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from torch import Tensor, nn
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    T5Config,
    T5EncoderModel,
)

from research.tiny.tiny import build_tiny, build_tokenizer
from sage_grpo.files.tensor_files import NAMES
from sage_grpo.models.backbone import Sampling
from sage_grpo.models.weights import INDEX, index_text, plan_files

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
WRITERS = 6  # threads; each holds one file of weights
FILE_BYTES = 2e9

Part = tuple[nn.Module, str]  # on the meta device, and its config.json


class Writer:
    """Draws weights on a device and writes them, several files at a time."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype, self.pool = device, dtype, ThreadPoolExecutor(WRITERS)
        self.files: list[Future[None]] = []

    def model(self, folder: Path, model: nn.Module, config: str) -> int:
        """Begin to write config and weights of one part; returns the number of parameters."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(config)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        sizes = {name: math.prod(shape) * self.dtype.itemsize for name, shape in shapes.items()}
        plan = plan_files(sizes, FILE_BYTES)
        files = plan.filename_to_tensors
        if len(files) > 1:
            (folder / INDEX).write_text(index_text(plan.tensor_to_filename, sum(sizes.values())))
        for file, names in files.items():
            self.file(folder / file, {name: shapes[name] for name in names})
        return sum(p.numel() for p in model.parameters())

    def file(self, path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
        """Begin to write one file."""
        seed = len(self.files)
        self.files.append(
            self.pool.submit(
                write_file, path, shapes, self.dtype, random_tensor(self.device, self.dtype, seed)
            )
        )

    def finish(self) -> None:
        """Wait for all files."""
        for file in self.files:
            file.result()


def random_tensor(
    device: torch.device, dtype: torch.dtype, seed: int
) -> Callable[[str, Sequence[int]], Tensor]:
    """Draws small values, and ones for normalization scales."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(name: str, shape: Sequence[int]) -> Tensor:
        scale = re.search(r"(norm|ln_)\w*\.(weight|gamma)$", name) is not None
        tensor = torch.ones(tuple(shape), device=device, dtype=dtype)
        return tensor if scale else tensor.normal_(0, 0.02, generator=generator)

    return draw


def write_file(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    draw: Callable[[str, Sequence[int]], Tensor],
) -> None:
    """Write a safetensors file, one tensor at a time. Plain writes of torch's memory: nothing is copied or hashed."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            file.write(memoryview(draw(name, shape).cpu().reshape(-1).view(torch.uint8).numpy()))


def full_parts(layers: int | None, encoders: bool, tokens: int) -> dict[str, Part]:
    """The parts of the published model; without `encoders`, of these only the widths."""
    text, glyph = dict(TEXT), dict(GLYPH)
    if not encoders:
        text |= {
            "num_hidden_layers": 3,
            "vocab_size": tokens,
            "bos_token_id": None,
            "eos_token_id": None,
        }
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
    return {name: writer.model(output / name, *part) for name, part in parts.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--layers", type=int, help="blocks of the transformer; default: 54")
    parser.add_argument("--encoders", action="store_true", help="text encoders at full size")
    parser.add_argument("--reward", action="store_true", help="add VideoAlign")
    parser.add_argument("--tiny", action="store_true", help="small parts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    begun, writer, words = time.perf_counter(), Writer(torch.device(options.device)), prompt_words()
    options.output.mkdir(parents=True)
    if options.tiny:
        parts = tiny_parts(options.layers, words)
        TINY_SAMPLING.to_json(options.output / "sampling.json")
    else:
        parts = full_parts(options.layers, options.encoders, len(build_tokenizer(words)))
    counts = write_model(options.output, parts, words, writer)
    if options.reward:
        from research.benchmarks.random_reward import write_reward

        counts["VideoReward"] = write_reward(
            options.output / "VideoReward", options.tiny, words, writer
        )
    writer.finish()
    (options.output / "model_index.json").write_text(
        '{"_class_name": "HunyuanVideo15Pipeline"}\n'
    )  # it is complete
    size = sum(path.stat().st_size for path in options.output.rglob("*.safetensors"))
    sizes = ", ".join(f"{name} {count / 1e6:,.1f} M" for name, count in counts.items())
    print(
        f"{options.output}: {sizes} parameters; {size / 1e9:.1f} GB in {time.perf_counter() - begun:.0f} s"
    )


if __name__ == "__main__":
    main()
