"""How precise, fast and large is the VAE's decoder in each precision?

    python -m research.benchmarks.vae_precision --output research/benchmarks/results/DATE-vae-precision.md \\
        [--model ckpts]

Errors are in gray levels of 255, on random latents and on those of a moving disc: for the embedded model against fp64,
for the full-size VAE against fp32 without TF32. Without `--model` its weights are random, and only time and memory are
those of the real one. The largest activation tells how far fp16 is from the end of its range, 65,504. About a minute
on one GPU.
"""

import argparse
import copy
import datetime
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import diffusers
import torch
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15CausalConv3d
from torch import Tensor, nn

from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.models.hunyuan15.vae import allow_batches

ROOT = Path(__file__).resolve().parents[2]
PRECISIONS = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32, "fp64": torch.float64
}  # fmt: skip


@contextmanager
def in_precision(backbone: Hunyuan15, name: str) -> Iterator[None]:
    """The backbone with its VAE rounded to a precision, from the weights it has now."""
    vae = backbone.vae
    convolutions = torch.backends.cudnn
    products = torch.backends.cuda.matmul
    before = (convolutions.allow_tf32, products.allow_tf32)
    convolutions.allow_tf32 = name == "tf32"
    products.allow_tf32 = name == "tf32"
    backbone.vae = nn.Module.to(copy.deepcopy(vae), PRECISIONS[name])
    try:
        yield
    finally:
        backbone.vae = vae
        convolutions.allow_tf32, products.allow_tf32 = before


def random_vae(device: torch.device) -> AutoencoderKLHunyuanVideo15:
    """The full-size VAE with random weights, tiled."""
    torch.manual_seed(0)
    with torch.device(device):
        vae = AutoencoderKLHunyuanVideo15().eval().requires_grad_(False)
    vae.enable_tiling()
    return allow_batches(vae)


def moving_disc(frames: int, height: int, width: int) -> Tensor:
    """A clip (1, F, Y, X, 3) uint8: a disc that crosses a gradient."""
    axes = [torch.linspace(0, 1, size) for size in (frames, height, width)]
    t, y, x = torch.meshgrid(*axes, indexing="ij")
    disc = ((y - 0.5).square() + (x - 0.2 - 0.6 * t).square()) < 0.03
    colors = torch.stack([x, y, 1 - x], -1).where(~disc[..., None], torch.tensor([0.9, 0.2, 0.1]))
    return (colors * 255).round().to(torch.uint8)[None]


def decoded(backbone: Hunyuan15, latents: Tensor) -> tuple[Tensor, float]:
    """Pixels in gray levels, and the largest absolute output of a layer."""
    largest: list[Tensor] = []  # of each layer

    def keep_largest(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        largest.append(output.abs().max().double())

    kinds = (nn.Conv3d, HunyuanVideo15CausalConv3d)
    layers = [layer for layer in backbone.vae.modules() if isinstance(layer, kinds)]
    hooks = [layer.register_forward_hook(keep_largest) for layer in layers]
    try:
        pixels = 127.5 * backbone._pixels(latents).double()
        return pixels, torch.stack(largest).max().item()
    finally:
        for hook in hooks:
            hook.remove()


def error_rows(
    backbone: Hunyuan15, title: str, clip: Tensor, names: Sequence[str], exact: str
) -> Iterator[str]:
    """A table row per latents and precision, compared with `exact`."""
    shape = backbone.latent_shape(*clip.shape[1:4])
    drawn = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1)).to(backbone.device)
    for kind, latents in {"random": drawn, "disc": backbone.encode_video(clip)}.items():
        with in_precision(backbone, exact):
            truth, _ = decoded(backbone, latents)
        for name in names:
            with in_precision(backbone, name):
                pixels, largest = decoded(backbone, latents)
            error = (pixels - truth).abs()
            differ = (pixels.round() != truth.round()).double().mean().item()
            rms = error.square().mean().sqrt().item()
            yield (
                f"| {title}, {kind} | {name} | {rms:.2g} | {error.max().item():.2g} | {rms / truth.std().item():.1g} "
                f"| {differ:.2%} | {largest:.3g} |"
            )


def cost_rows(
    backbone: Hunyuan15, sizes: Sequence[tuple[int, int, int]], names: Sequence[str]
) -> Iterator[str]:
    """A table row with time and peak memory per clip size and precision, after a short clip."""
    gpu = backbone.device.type == "cuda"
    for frames, height, width in sizes:
        shape = backbone.latent_shape(frames, height, width)
        latents = torch.randn(1, *shape, device=backbone.device)
        for name in names:
            with in_precision(backbone, name):
                backbone._pixels(latents[:, :, :1])
                if gpu:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated() if gpu else 0
                begin = time.perf_counter()
                finite = bool(backbone._pixels(latents).isfinite().all())
                seconds = time.perf_counter() - begin
                inside = (torch.cuda.max_memory_allocated() - before) / 1e9 if gpu else 0.0
            yield f"| {frames} x {height} x {width} | {name} | {seconds:.2f} | {inside:.1f} | {finite} |"


@torch.no_grad()
def measure(options: argparse.Namespace, device: torch.device) -> str:
    """The results as Markdown."""
    small = Hunyuan15(ROOT / "assets" / "tiny", device)
    large = Hunyuan15(options.model or "none", device)
    if not options.model:
        large.vae = random_vae(device)
    fast = ("bf16", "fp16", "tf32")
    title = f"full size, {'real' if options.model else 'random'} weights"
    errors = [
        *error_rows(small, "embedded", moving_disc(*options.tiny), (*fast, "fp32"), "fp64"),
        *error_rows(large, title, moving_disc(*options.clip), fast, "fp32"),
    ]
    sizes = [(frames, *options.size) for frames in options.frames]
    costs = list(cost_rows(large, sizes, fast))
    where = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    versions = f"torch {torch.__version__}, diffusers {diffusers.__version__}, Python {platform.python_version()}"
    lines = [
        f"# Precision of the VAE's decoder, {where}, {datetime.date.today()}", "",
        f"    {shlex.join(['python', *sys.orig_argv[1:]])}", "",
        f"{versions}. Errors in gray levels of 255, relative to the standard deviation of the pixels, and the share of "
        f"bytes that round differently. Clips of {options.tiny[0]} frames (embedded) and {options.clip[0]} frames.", "",
        "| | | RMS | largest | relative | other bytes | largest activation |", "|---|---|---|---|---|---|---|",
        *errors, "",
        "| | | s | GB inside | finite |", "|---|---|---|---|---|", *costs,
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, help="page to write")
    add("--model", type=Path, help="model folder (default: the full-size VAE, random weights)")
    add("--frames", type=int, nargs="*", default=(81, 121), help="lengths of the timed clips")
    add("--size", type=int, nargs=2, default=(480, 848), help="their height and width")
    add("--clip", type=int, nargs=3, default=(17, 256, 256), help="clip whose errors are measured")
    add("--tiny", type=int, nargs=3, default=(9, 32, 32), help="the same for the embedded model")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    page = measure(options, device)
    options.output.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
