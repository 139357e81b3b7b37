"""How fast is the packed transformer, compared with stock diffusers on the same weights, GPU and run?

    python -m research.benchmarks.transformer --output research/benchmarks/DATE-transformer.md

Random weights of the full architecture, bf16, batch 1. Each row is the median of a few repetitions after a warm-up,
with the spread, the peak memory, and the rate of useful work as a fraction of the GPU's rate for a large bf16 matmul.
Useful work does not count recomputation. Slow rows of the 50-step sampler are extrapolated from a few timed steps; the
table says so.
"""

import argparse
import datetime
import gc
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch
from torch import Tensor, nn

from research.benchmarks.stock import StockTransformer
from sage_grpo.models.cost import BACKWARD_OF_ATTENTION, Architecture, Forward
from sage_grpo.models.denoiser import Denoiser
from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.models.hunyuan15.transformer import PackedTransformer
from sage_grpo.models.lora import POLICY, add_adapter, init_adapter
from sage_grpo.train.guards import heard
from sage_grpo.train.optimization import trainable_parameters

PADDING = {
    "text": 1000,
    "glyph": 256,
    "image": 729,
}  # tokens to which the stock pipeline pads every prompt


@dataclass(frozen=True)
class Clip:
    """Inputs of one forward."""

    frames: int
    height: int
    width: int
    text: int  # prompt tokens
    image: int = 0  # tokens of an image

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.frames - 1) // 4 + 1, self.height // 16, self.width // 16

    def work(self, model: PackedTransformer) -> Forward:
        c, unused = model.config, dict.fromkeys(("parameters", "block", "vae"), 0)
        layers = {"layers": c.num_layers, "heads": c.num_attention_heads, "mlp_ratio": c.mlp_ratio}
        width = c.num_attention_heads * c.attention_head_dim
        sizes = Architecture(
            **layers, **unused, width=width, channels=c.out_channels, temporal=4, spatial=16
        )
        return sizes.forward(
            sizes.video_tokens(self.frames, self.height, self.width), self.text + self.image
        )

    def packed(self, model: nn.Module, like: Tensor) -> tuple[Tensor, ...]:
        c = model.config
        draw = torch.Generator(like.device).manual_seed(1)
        video = torch.randn(1, c.in_channels, *self.grid, generator=draw, device=like.device).to(
            like.dtype
        )
        text = torch.randn(1, self.text, c.text_embed_dim, generator=draw, device=like.device).to(
            like.dtype
        )
        seen = torch.randn(1, self.image, c.image_embed_dim, generator=draw, device=like.device).to(
            like.dtype
        )
        context = (text, like.new_zeros(1, 0, c.text_embed_2_dim), *([seen] if self.image else []))
        return video, torch.tensor([731.0], device=like.device), *context

    def stock(self, model: nn.Module, like: Tensor) -> dict[str, Tensor]:
        """Inputs of the stock model for the same clip, padded as in the stock pipeline."""
        video, timestep, text, glyph, *image = self.packed(model, like)
        short = PADDING["text"] - self.text
        return {
            "hidden_states": video,
            "timestep": timestep.to(like.dtype),
            "encoder_hidden_states": nn.functional.pad(text, (0, 0, 0, short)),
            "encoder_attention_mask": nn.functional.pad(like.new_ones(1, self.text), (0, short)),
            "encoder_hidden_states_2": like.new_zeros(1, PADDING["glyph"], glyph.shape[2]),
            "encoder_attention_mask_2": like.new_zeros(1, PADDING["glyph"]),
            "image_embeds": image[0]
            if image
            else like.new_zeros(1, PADDING["image"], model.config.image_embed_dim),
        }


@dataclass
class Row:
    name: str
    milliseconds: list[float]
    first: float  # seconds of the first call, including compilation
    peak: float  # GiB
    work: float  # floating-point operations
    note: str = ""


class Bench:
    def __init__(
        self, device: torch.device, dtype: torch.dtype, repeat: int, only: str = ""
    ) -> None:
        self.device, self.dtype, self.repeat, self.rows = device, dtype, repeat, []
        self.only = re.compile(only)

    def wants(self, name: str) -> bool:
        return self.only.search(name) is not None

    def run(
        self, name: str, call: Callable[[], object], work: float, times: int = 1, note: str = ""
    ) -> None:
        """Time a call; `times` multiplies its time and work."""
        if not self.wants(name):
            return
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        first = self._timed(call)
        seconds = [self._timed(call) for _ in range(self.repeat)]
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
        row = Row(name, [1e3 * times * s for s in seconds], first, peak, work * times, note)
        self.rows.append(row)
        print(
            f"{name}: {statistics.median(row.milliseconds):.0f} ms, first {first:.1f} s, peak {peak:.1f} GiB",
            flush=True,
        )

    def _timed(self, call: Callable[[], object]) -> float:
        self._wait()
        begun = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - begun

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def random_model(
    sizes: dict[str, int],
    device: torch.device,
    dtype: torch.dtype,
    kind: type[Denoiser] = PackedTransformer,
) -> Denoiser:
    with torch.device("meta"):
        model = kind(**sizes)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.to_empty(device=device).eval().requires_grad_(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name and parameter.ndim == 1 else parameter.normal_(
                0, 0.02
            )
    return model


def stock_twin(model: Denoiser, kind: type[Denoiser] = StockTransformer) -> Denoiser:
    """The stock diffusers model, sharing the same weights in memory."""
    with torch.device("meta"):
        twin = kind.from_config(model.config)
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin.eval().requires_grad_(False)


def training_step(forward: Callable[[], Tensor], model: nn.Module) -> Callable[[], None]:
    def step() -> None:
        forward().float().square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def set_blocks(model: Denoiser, *arguments: object) -> None:
    """Prepare the blocks again."""
    for block in model.all_blocks:
        block.__dict__.pop("forward", None)
    torch._dynamo.reset()
    model.prepare_blocks(*arguments)


def adapted(
    model: Denoiser,
    dtype: torch.dtype,
    train_all: bool,
    layers: tuple[str, ...] = Hunyuan15.lora_targets,
) -> Denoiser:
    """The model, ready for LoRA or for training all weights."""
    if train_all:
        trainable_parameters(model, use_lora=False)
    else:
        add_adapter(model, 32, 64, layers, dtype)
        init_adapter(model, 0)
        trainable_parameters(model, use_lora=True)
    return model


def free() -> None:
    """Forget graphs and free memory between parts; the peak starts again."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOPs per second of one large matmul."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    bench = Bench(device, dtype, 5)
    bench.run(f"product of {size} x {size} matrices", lambda: [a @ b for _ in range(20)], 0)
    return 20 * 2 * size**3 / (statistics.median(bench.rows[0].milliseconds) / 1e3)


def cases(
    bench: Bench, sizes: dict[str, int], short: Clip, long: Clip, steps: int
) -> Iterator[str]:
    """Run all cases; yields correctness findings."""
    model = random_model(sizes, bench.device, bench.dtype)
    like = next(model.parameters())
    twin, work = stock_twin(model), short.work(model)
    padded, packed = short.stock(twin, like), short.packed(model, like)

    def ours() -> Tensor:
        return model(*packed)

    def stock() -> Tensor:
        return twin(**padded, return_dict=False)[0]

    with torch.no_grad():
        bench.run("forward, stock", stock, sum(work))
        bench.run("forward, packed", ours, sum(work))
        plain, theirs = ours().float(), stock().float()
        set_blocks(model, 0.0, False, True)
        bench.run("forward, packed and compiled", ours, sum(work))
        compiled = ours().float()
        yield f"packed to stock: velocity {distance(plain, theirs):.2g} apart (stock rounds timesteps to bf16)"
        yield f"packed and compiled to packed: velocity {distance(compiled, plain):.2g} apart"
        far, padded_far = long.packed(model, like), long.stock(twin, like)
        times = f"{2 * steps} forwards, one timed"
        bench.run(
            f"{steps} steps with guidance, stock",
            lambda: twin(**padded_far),
            sum(long.work(model)),
            2 * steps,
            times,
        )
        bench.run(f"{steps} steps with guidance, compiled", lambda: [model(*far) for _ in range(4)],
                  4 * sum(long.work(model)), steps // 2, f"{2 * steps} forwards, four timed")  # fmt: skip
        if bench.wants("forward, compiled, 8 bits"):
            yield from in_8_bits(bench, model, ours, sum(work), plain)
    for kind in ("LoRA", "all weights"):
        backward = (
            work.linear * (1 if kind == "LoRA" else 2) + work.attention * BACKWARD_OF_ATTENTION
        )
        useful = sum(work) + backward  # without recomputation
        for name, target, forward in (("stock", twin, stock), ("packed", model, ours)):
            adapted(target, bench.dtype, kind != "LoRA")
            if name == "stock":
                target.enable_gradient_checkpointing()
                target.train()
                bench.run(f"{kind}, stock, checkpointed", training_step(forward, target), useful)
                target.eval()
                target.disable_gradient_checkpointing()
            else:
                yield from training_cases(bench, kind, model, ours, useful)
            if kind == "LoRA":
                target.delete_adapters(POLICY)


def in_8_bits(
    bench: Bench, model: Denoiser, forward: Callable[[], Tensor], work: float, exact: Tensor
) -> Iterator[str]:
    """The forward of steps outside the window, with linear layers in 8 bits."""
    set_blocks(model, 0.0, False, True, "fp8")
    with model.lossy():
        bench.run("forward, compiled, 8 bits", forward, work)
        yield f"compiled, in 8 bits, to packed: velocity {distance(forward().float(), exact):.2g} apart"
    model.in_8_bits = None


def training_cases(
    bench: Bench, kind: str, model: Denoiser, forward: Callable[[], Tensor], useful: float
) -> Iterator[str]:
    variants = {"checkpointed": (1.0, False, False), "checkpointed, compiled": (1.0, False, True)}
    variants |= {"attention kept, compiled": (1.0, True, True)}
    for name, arguments in variants.items():
        if (kind != "LoRA" and name == "checkpointed") or not bench.wants(f"{kind}, {name}"):
            continue
        set_blocks(model, *arguments)
        bench.run(f"{kind}, {name}", training_step(forward, model), useful)
        with torch.no_grad():
            rollout = forward().float()
        yield f"{kind}, {name}: rollout to training {distance(forward().detach().float(), rollout):.2g}"


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def page(bench: Bench, peak_rate: float, facts: list[str], short: Clip, long: Clip) -> str:
    """The results as Markdown."""
    where = torch.cuda.get_device_name() if bench.device.type == "cuda" else platform.machine()
    versions = f"torch {torch.__version__}, diffusers {diffusers.__version__}, Python {platform.python_version()}"
    lines = [
        f"# Transformer, {where}, {datetime.date.today()}", "",
        f"    {shlex.join(['python', *sys.orig_argv[1:]])}", "",
        f"{versions}, {bench.dtype}. Clips of {short.frames} x {short.height} x {short.width}, {short.text} text "
        f"tokens; the sampler's of {long.frames} frames. Median of {bench.repeat} repetitions, in brackets the spread. "
        f"The card's rate for a large product: {peak_rate / 1e12:.0f} TFLOP/s.", "",
        "| | ms | first call, s | peak GiB | of the card's rate | |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in bench.rows:
        middle, low, high = (
            statistics.median(row.milliseconds),
            min(row.milliseconds),
            max(row.milliseconds),
        )
        share = row.work / (middle / 1e3) / peak_rate
        lines.append(f"| {row.name} | {middle:.0f} ({low:.0f} to {high:.0f}) | {row.first:.1f} | {row.peak:.1f} "
                     f"| {share:.0%} | {row.note} |")  # fmt: skip
    return "\n".join([*lines, "", *(f"- {fact}" for fact in facts)]) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument(
        "--only",
        default="",
        metavar="PATTERN",
        help="rows whose names match this regular expression",
    )
    parser.add_argument("--steps", type=int, default=50, help="steps of the sampler")
    parser.add_argument("--layers", type=int, help="number of blocks; default: all 54")
    parser.add_argument("--width", type=int, help="channels of a head; default: 128")
    parser.add_argument(
        "--clip", type=int, nargs=4, default=(81, 480, 848, 150), help="frames, height, width, text"
    )
    parser.add_argument(
        "--long", type=int, nargs=4, default=(121, 480, 848, 150), help="the sampler's clip"
    )
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = {} if options.layers is None else {"num_layers": options.layers}
    if options.width is not None:
        sizes |= {
            "attention_head_dim": options.width,
            "rope_axes_dim": (options.width // 2, *[options.width // 4] * 2),
        }
    bench, short, long = (
        Bench(device, dtype, options.repeat, options.only),
        Clip(*options.clip),
        Clip(*options.long),
    )
    peak_rate = rate(device, dtype, 8192 if device.type == "cuda" else 512)
    facts: list[str] = []
    try:
        with heard(lambda *_: sys.exit("transformer.py: stopped by a signal")):
            for fact in cases(bench, sizes, short, long, options.steps):
                print(fact, flush=True)
                facts.append(fact)
    finally:  # keep what was measured
        options.output.write_text(page(bench, peak_rate, facts, short, long))
        print(options.output.read_text())


if __name__ == "__main__":
    main()
