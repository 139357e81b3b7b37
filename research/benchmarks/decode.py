"""How fast can the VAE decode? Tiled and untiled, padded by slices, channels last, and with what lies between compiled.

    python -m research.benchmarks.decode --output research/benchmarks/results/DATE-decode-h200.md

The full-size VAE with random weights, in fp16. Seconds are those of the second clip; a compiled decoder needs more for
its first. The error is against fp32 without TF32, in gray levels of 255, on a short clip; the last column compares the
whole clip with that of the first way. A few minutes on one GPU.
"""

import argparse
import copy
import datetime
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15 as VAE
from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as stock
from torch import Tensor

from research.benchmarks.vae_precision import random_vae
from research.tiny.learn_vae import padded_conv
from sage_grpo.models.hunyuan15.vae import fuse_decoder


def untiled(vae: VAE) -> None:
    """Decode clips whole."""
    vae.disable_tiling()


def sliced(vae: VAE) -> None:
    """Pad by slices: torch's own kernel copies element by element."""
    for module in vae.modules():
        if isinstance(module, stock.HunyuanVideo15CausalConv3d):
            module.forward = partial(padded_conv, module)


def channels_last(vae: VAE) -> None:
    """Store channels last in memory."""
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv3d):
            module.to(memory_format=torch.channels_last_3d)


WAYS: dict[str, Sequence[Callable[[VAE], object]]] = {
    "untiled": (untiled,),
    "tiled": (),
    "untiled, sliced": (untiled, sliced),
    "untiled, sliced, channels last": (untiled, sliced, channels_last),
    "untiled, compiled (the recipes)": (untiled, fuse_decoder),
}


def decode(vae: VAE, latents: Tensor) -> tuple[Tensor, float, float]:
    """Pixels, seconds and the gigabytes inside, of the second of two decodes."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        pixels = vae.decode(latents, return_dict=False)[0]
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        inside = (torch.cuda.max_memory_allocated() - before) / 1e9
    return pixels, seconds, inside


def gray_levels(difference: Tensor) -> float:
    """RMS of a difference of pixels in [-1, 1], in gray levels of 255."""
    return 127.5 * difference.float().square().mean().sqrt().item()


@torch.no_grad()
def rows(clip: Sequence[int], short: Sequence[int], names: Sequence[str]) -> Iterator[str]:
    """A table row per way."""
    stock_vae = random_vae(torch.device("cuda"))

    def draw(size: Sequence[int]) -> Tensor:
        frames, height, width = size
        grid = ((frames - 1) // 4 + 1, height // 16, width // 16)
        return torch.randn(1, stock_vae.config.latent_channels, *grid, device="cuda")

    latents = draw(clip)
    short_latents = draw(short)
    torch.backends.cudnn.allow_tf32 = False
    truth = stock_vae.decode(short_latents, return_dict=False)[0]
    torch.backends.cudnn.allow_tf32 = True

    reference = None  # pixels of the first way
    for name in names:
        vae = copy.deepcopy(stock_vae).half()
        for change in WAYS[name]:
            change(vae)
        torch.compiler.reset()
        begin = time.perf_counter()
        pixels, seconds, inside = decode(vae, latents.half())
        first = time.perf_counter() - begin - seconds
        if reference is None:
            reference = pixels.cpu()
        apart = gray_levels(pixels - reference.to(pixels.device))
        del pixels
        short_pixels, _, _ = decode(vae, short_latents.half())
        error = gray_levels(short_pixels.float() - truth)
        yield f"| {name} | {seconds:.2f} | {inside:.1f} | {error:.2g} | {first:.0f} | {apart:.2g} |"
        del vae


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, help="page to write")
    add("--clip", type=int, nargs=3, default=(81, 352, 624), help="frames, height and width")
    add("--short", type=int, nargs=3, default=(9, 256, 256), help="clip whose error is measured")
    add("--ways", nargs="*", choices=WAYS, default=list(WAYS), help="default: all")
    options = parser.parse_args()
    size = " x ".join(map(str, options.clip))
    lines = [
        f"# Decoding a clip of {size}, {torch.cuda.get_device_name()}, {datetime.date.today()}", "",
        f"    {shlex.join(['python', *sys.orig_argv[1:]])}", "",
        f"torch {torch.__version__}, fp16, random weights. Error: RMS against fp32, in gray levels of 255.", "",
        "| | s | GB inside | error | s before, first clip | from the first way |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows(options.clip, options.short, options.ways):
        print(row, flush=True)
        lines.append(row)
        # After each way: compiling one can take minutes.
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
