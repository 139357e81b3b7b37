"""How fast is the packed transformer, compared with stock diffusers on the same weights, GPU and run?

    python -m research.benchmarks.transformer --output research/benchmarks/results/DATE-transformer.md

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
from typing import Any

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

# tokens to which the stock pipeline pads every prompt
PADDING = {"text": 1000, "glyph": 256, "image": 729}


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
        """Latent frames, rows and columns."""
        return (self.frames - 1) // 4 + 1, self.height // 16, self.width // 16

    def work(self, model: PackedTransformer) -> Forward:
        """Floating-point operations of a forward."""
        c = model.config
        sizes = Architecture(
            layers=c.num_layers,
            heads=c.num_attention_heads,
            mlp_ratio=c.mlp_ratio,
            width=c.num_attention_heads * c.attention_head_dim,
            channels=c.out_channels,
            temporal=4,
            spatial=16,
            parameters=0,  # not used here, as the next two
            block=0,
            vae=0,
        )
        tokens = sizes.video_tokens(self.frames, self.height, self.width)
        return sizes.forward(tokens, self.text + self.image)

    def packed(self, model: nn.Module, like: Tensor) -> tuple[Tensor, ...]:
        """Inputs of our model, on the device and in the dtype of `like`."""
        c = model.config
        generator = torch.Generator(like.device).manual_seed(1)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=like.device).to(like.dtype)

        video = draw(1, c.in_channels, *self.grid)
        text = draw(1, self.text, c.text_embed_dim)
        image = draw(1, self.image, c.image_embed_dim)
        glyph = like.new_zeros(1, 0, c.text_embed_2_dim)
        timestep = torch.tensor([731.0], device=like.device)
        inputs = (video, timestep, text, glyph)
        return (*inputs, image) if self.image else inputs

    def stock(self, model: nn.Module, like: Tensor) -> dict[str, Tensor]:
        """Inputs of the stock model for the same clip, padded as in the stock pipeline."""
        video, timestep, text, glyph, *images = self.packed(model, like)
        missing = PADDING["text"] - self.text
        no_image = like.new_zeros(1, PADDING["image"], model.config.image_embed_dim)
        return {
            "hidden_states": video,
            "timestep": timestep.to(like.dtype),
            "encoder_hidden_states": nn.functional.pad(text, (0, 0, 0, missing)),
            "encoder_attention_mask": nn.functional.pad(like.new_ones(1, self.text), (0, missing)),
            "encoder_hidden_states_2": like.new_zeros(1, PADDING["glyph"], glyph.shape[2]),
            "encoder_attention_mask_2": like.new_zeros(1, PADDING["glyph"]),
            "image_embeds": images[0] if images else no_image,
        }


@dataclass
class Row:
    """Times of one call."""

    name: str
    milliseconds: list[float]
    first: float  # seconds of the first call, including compilation
    peak: float  # GiB
    work: float  # floating-point operations
    note: str = ""


class Bench:
    """Times calls; each becomes a row. only: a regular expression of the rows that are wanted."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, repeat: int, only: str = ""
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.repeat = repeat
        self.only = re.compile(only)
        self.rows: list[Row] = []

    def wants(self, name: str) -> bool:
        """Whether a row is wanted."""
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
        milliseconds = [1e3 * times * self._timed(call) for _ in range(self.repeat)]
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
        self.rows.append(Row(name, milliseconds, first, peak, work * times, note))
        median = statistics.median(milliseconds)
        print(f"{name}: {median:.0f} ms, first {first:.1f} s, peak {peak:.1f} GiB", flush=True)

    def _timed(self, call: Callable[[], object]) -> float:
        """Seconds of one call."""
        self._wait()
        begin = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def random_model(
    sizes: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    kind: type[Denoiser] = PackedTransformer,
) -> Denoiser:
    """A frozen model with random weights; sizes: other than the defaults of its class."""
    with torch.device("meta"):
        model = kind(**sizes)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.to_empty(device=device).eval().requires_grad_(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0, 0.02)
    return model


def stock_twin(model: Denoiser, kind: type[Denoiser] = StockTransformer) -> Denoiser:
    """The stock diffusers model, sharing the same weights in memory."""
    with torch.device("meta"):
        twin = kind.from_config(model.config)
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin.eval().requires_grad_(False)


def training_step(forward: Callable[[], Tensor], model: nn.Module) -> Callable[[], None]:
    """A forward and backward, without the optimizer."""

    def step() -> None:
        forward().float().square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def set_blocks(model: Denoiser, **options: Any) -> None:
    """Prepare the blocks again; options: those of `prepare_blocks`."""
    for block in model.all_blocks:
        block.__dict__.pop("forward", None)
    torch._dynamo.reset()
    model.prepare_blocks(**options)


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
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    bench = Bench(device, dtype, repeat=5)
    bench.run(f"product of {size} x {size} matrices", lambda: [a @ b for _ in range(20)], 0)
    seconds = statistics.median(bench.rows[0].milliseconds) / 1e3
    return 20 * 2 * size**3 / seconds


def cases(
    bench: Bench, sizes: dict[str, Any], short: Clip, long: Clip, steps: int
) -> Iterator[str]:
    """Run all cases; yields correctness findings."""
    model = random_model(sizes, bench.device, bench.dtype)
    twin = stock_twin(model)
    like = next(model.parameters())
    work = short.work(model)
    packed = short.packed(model, like)
    padded = short.stock(twin, like)

    def ours() -> Tensor:
        return model(*packed)

    def stock() -> Tensor:
        return twin(**padded, return_dict=False)[0]

    with torch.no_grad():
        bench.run("forward, stock", stock, sum(work))
        bench.run("forward, packed", ours, sum(work))
        plain = ours().float()
        stock_velocity = stock().float()
        set_blocks(model, compiled=True)
        bench.run("forward, packed and compiled", ours, sum(work))
        compiled = ours().float()
        apart = distance(plain, stock_velocity)
        yield f"packed to stock: velocity {apart:.2g} apart (stock rounds timesteps to bf16)"
        yield f"packed and compiled to packed: velocity {distance(compiled, plain):.2g} apart"

        long_packed = long.packed(model, like)
        long_padded = long.stock(twin, like)
        long_work = sum(long.work(model))
        bench.run(
            f"{steps} steps with guidance, stock",
            lambda: twin(**long_padded),
            long_work,
            times=2 * steps,
            note=f"{2 * steps} forwards, one timed",
        )
        bench.run(
            f"{steps} steps with guidance, compiled",
            lambda: [model(*long_packed) for _ in range(4)],
            4 * long_work,
            times=steps // 2,
            note=f"{2 * steps} forwards, four timed",
        )
        if bench.wants("forward, compiled, 8 bits"):
            yield from in_8_bits(bench, model, ours, sum(work), plain)
    for kind in ("LoRA", "all weights"):
        with_lora = kind == "LoRA"
        backward_of_linear = 1 if with_lora else 2  # LoRA needs no gradient of the frozen weights
        backward = work.linear * backward_of_linear + work.attention * BACKWARD_OF_ATTENTION
        useful = sum(work) + backward  # without recomputation

        adapted(twin, bench.dtype, train_all=not with_lora)
        twin.enable_gradient_checkpointing()
        twin.train()
        bench.run(f"{kind}, stock, checkpointed", training_step(stock, twin), useful)
        twin.eval()
        twin.disable_gradient_checkpointing()
        if with_lora:
            twin.delete_adapters(POLICY)

        adapted(model, bench.dtype, train_all=not with_lora)
        yield from training_cases(bench, kind, model, ours, useful)
        if with_lora:
            model.delete_adapters(POLICY)


def in_8_bits(
    bench: Bench, model: Denoiser, forward: Callable[[], Tensor], work: float, exact: Tensor
) -> Iterator[str]:
    """The forward of steps outside the window, with linear layers in 8 bits."""
    set_blocks(model, compiled=True, lossy="fp8")
    with model.lossy():
        bench.run("forward, compiled, 8 bits", forward, work)
        apart = distance(forward().float(), exact)
        yield f"compiled, in 8 bits, to packed: velocity {apart:.2g} apart"
    model.in_8_bits = None


def training_cases(
    bench: Bench, kind: str, model: Denoiser, forward: Callable[[], Tensor], useful: float
) -> Iterator[str]:
    """Training steps of our model; yields how far its velocity is from that of a rollout."""
    variants = {
        "checkpointed": {},
        "checkpointed, compiled": {"compiled": True},
        "attention kept, compiled": {"compiled": True, "keep_attention": True},
    }
    if kind != "LoRA":
        del variants["checkpointed"]
    for variant, options in variants.items():
        name = f"{kind}, {variant}"
        if not bench.wants(name):
            continue
        set_blocks(model, recomputed=1.0, **options)
        bench.run(name, training_step(forward, model), useful)
        yield f"{name}: rollout to training {rollout_to_training(forward):.2g}"


def rollout_to_training(forward: Callable[[], Tensor]) -> float:
    """How far the velocity with gradients is from that without."""
    with torch.no_grad():
        rollout = forward().float()
    return distance(forward().detach().float(), rollout)


def distance(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over that of b."""
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
        median = statistics.median(row.milliseconds)
        spread = f"{min(row.milliseconds):.0f} to {max(row.milliseconds):.0f}"
        share = row.work / (median / 1e3) / peak_rate
        lines.append(
            f"| {row.name} | {median:.0f} ({spread}) | {row.first:.1f} | {row.peak:.1f} "
            f"| {share:.0%} | {row.note} |"
        )
    return "\n".join([*lines, "", *(f"- {fact}" for fact in facts)]) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="page to write")
    add("--repeat", type=int, default=2, help="timed repetitions (default: %(default)s)")
    add("--only", default="", metavar="PATTERN",
        help="rows whose names match this regular expression")  # fmt: skip
    add("--steps", type=int, default=50, help="steps of the sampler (default: %(default)s)")
    add("--layers", type=int, help="number of blocks (default: all 54)")
    add("--width", type=int, help="channels of a head (default: 128)")
    add(
        "--clip", type=int, nargs=4, default=(81, 480, 848, 150), help="frames, height, width, text"
    )
    add("--long", type=int, nargs=4, default=(121, 480, 848, 150), help="the sampler's clip")
    options = parser.parse_args(arguments)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes: dict[str, Any] = {}
    if options.layers is not None:
        sizes["num_layers"] = options.layers
    if options.width is not None:
        quarter = options.width // 4
        sizes["attention_head_dim"] = options.width
        sizes["rope_axes_dim"] = (options.width // 2, quarter, quarter)
    bench = Bench(device, dtype, options.repeat, options.only)
    short = Clip(*options.clip)
    long = Clip(*options.long)
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
