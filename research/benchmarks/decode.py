"""How fast can the VAE decode? Tiled and untiled, padded by slices, channels last, and with what lies between compiled.

    python -m research.benchmarks.decode --output research/benchmarks/DATE-decode-h200.md

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
from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15 as VAE
from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as stock
from torch import Tensor

from research.benchmarks.vae_precision import random_vae
from research.tiny.learn_vae import replicate_pad
from sage_grpo.models.hunyuan15.vae import fuse_decoder


def untiled(vae: VAE) -> None:
    vae.disable_tiling()


def sliced(vae: VAE) -> None:
    """Padding by slices: torch's own kernel copies element by element."""
    for module in vae.modules():
        if isinstance(module, stock.HunyuanVideo15CausalConv3d):
            module.forward = lambda x, layer=module: layer.conv(
                replicate_pad(x, layer.time_causal_padding)
            )


def channels_last(vae: VAE) -> None:
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
        before, begin = torch.cuda.memory_allocated(), time.perf_counter()
        pixels = vae.decode(latents, return_dict=False)[0]
        torch.cuda.synchronize()
        seconds, inside = (
            time.perf_counter() - begin,
            (torch.cuda.max_memory_allocated() - before) / 1e9,
        )
    return pixels, seconds, inside


@torch.no_grad()
def rows(clip: Sequence[int], short: Sequence[int], names: Sequence[str]) -> Iterator[str]:
    whole = random_vae(torch.device("cuda"))
    drawn = [
        torch.randn(
            1, whole.config.latent_channels, (f - 1) // 4 + 1, y // 16, x // 16, device="cuda"
        )
        for f, y, x in (clip, short)
    ]
    torch.backends.cudnn.allow_tf32 = False
    truth = whole.decode(drawn[1], return_dict=False)[0]
    torch.backends.cudnn.allow_tf32, reference = True, None
    for name in names:
        vae = copy.deepcopy(whole).half()
        for change in WAYS[name]:
            change(vae)
        torch.compiler.reset()
        begin = time.perf_counter()
        pixels, seconds, inside = decode(vae, drawn[0].half())
        first = time.perf_counter() - begin - seconds
        reference = pixels.cpu() if reference is None else reference
        apart = 127.5 * (pixels - reference.to(pixels.device)).float().square().mean().sqrt().item()
        del pixels
        error = (
            127.5 * (decode(vae, drawn[1].half())[0].float() - truth).square().mean().sqrt().item()
        )
        yield f"| {name} | {seconds:.2f} | {inside:.1f} | {error:.2g} | {first:.0f} | {apart:.2g} |"
        del vae


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--clip", type=int, nargs=3, default=(81, 352, 624), help="frames, height and width"
    )
    parser.add_argument(
        "--short", type=int, nargs=3, default=(9, 256, 256), help="the clip whose error is measured"
    )
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
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
        options.output.write_text(
            "\n".join(lines) + "\n"
        )  # after each way: compiling one can take minutes


if __name__ == "__main__":
    main()
