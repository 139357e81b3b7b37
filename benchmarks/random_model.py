"""Write a model folder with the full HunyuanVideo-1.5 architecture and random weights, for benchmarks only.

    python -m benchmarks.random_model --output /tmp/random_model [--layers 54] [--device cuda]

Transformer (8.3 B parameters) and VAE are full size. The text encoders have the real widths but three layers: they are
used once per prompt and then leave the device.
"""

import argparse
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel, ModelMixin
from torch import Tensor, nn

from embedded.tiny import TinyConfig, build_tiny
from sage_grpo.models.backbone import Sampling
from sage_grpo.models.weights import save_weights

WORDS = ("a", "the", "of", "in", "on", "and", "slowly", "camera", "light")
ENCODERS = TinyConfig(text_dim=3584, glyph_dim=1472)
SAMPLING = Sampling(frames=81, height=352, width=624, fps=24, shift=5.0, guidance=6.0, num_steps=20)


def random_weights(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Small random values, and ones for normalization scales."""
    generator = torch.Generator(device).manual_seed(0)
    for name, tensor in model.state_dict().items():
        drawn = torch.empty(tensor.shape, device=device, dtype=dtype).normal_(0, 0.02, generator=generator)
        yield name, torch.ones_like(drawn) if "norm" in name and name.endswith(("weight", "gamma")) else drawn


def write_part(kind: type[ModelMixin], folder: Path, device: torch.device, dtype: torch.dtype, **sizes: int) -> int:
    """Write config and weights of one part; returns the number of parameters."""
    shutil.rmtree(folder)
    with torch.device("meta"):
        model = kind(**sizes)
    save_weights(folder, random_weights(model, device, dtype))
    (folder / "config.json").write_text(model.to_json_string())
    return sum(p.numel() for p in model.parameters())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=54, help="blocks of the transformer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    begun, device = time.perf_counter(), torch.device(options.device)
    build_tiny(0, WORDS, ENCODERS).save_pretrained(options.output)
    where = (options.output / "transformer", device, torch.bfloat16)
    size = write_part(HunyuanVideo15Transformer3DModel, *where, num_layers=options.layers)
    write_part(AutoencoderKLHunyuanVideo15, options.output / "vae", device, torch.bfloat16)
    SAMPLING.to_json(options.output / "sampling.json")
    print(f"{options.output}: {size:,} parameters of the transformer in {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
