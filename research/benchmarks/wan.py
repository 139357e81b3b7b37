"""A Wan on one GPU: its transformer against stock diffusers, and a GRPO iteration inside 24 GB.

    python -m research.benchmarks.wan --output research/benchmarks/results/DATE-wan-h200.md
    python -m research.benchmarks.wan --model wan22-ti2v-5b --output research/benchmarks/results/DATE-ti2v-h200.md
    python -m research.benchmarks.wan --model wan22-t2v-a14b --output research/benchmarks/results/DATE-a14b-h200.md

transformer  forward and LoRA step, ours and stock on the same weights, 81 x 480 x 832, bf16, one clip
image        the same with a clean first frame, for models that animate images
grpo         one iteration of the model's recipe for a 24 GB card by the unmodified trainer, with the VAE and VideoAlign
             at full size, after every graph was compiled; torch may allocate 24 GB. A14B, whose transformers take turns
             on the GPU, runs its recipe for eight GPUs on one, with shorter clips and without a limit

Random weights. The page is written after each part. `--only NAME` runs one part, `--rehearse` tries the script with a
tiny model on the CPU, `--write_only` writes the weights for a later call.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from research.benchmarks.clips import warm
from research.benchmarks.grpo import PHASES, measure, trainer_overhead
from research.benchmarks.parts import ROOT, Results, about, begin, failure, heading, table, wrapped
from research.benchmarks.random_model import prompt_words
from research.benchmarks.random_reward import write_reward
from research.benchmarks.random_wan import (
    MODELS,
    TINY_TRANSFORMER,
    link_experts,
    write_index,
    write_wan,
)
from research.benchmarks.random_weights import Writer
from research.benchmarks.stock import StockWan
from research.benchmarks.transformer import (
    Bench,
    adapted,
    distance,
    free,
    random_model,
    rollout_to_training,
    set_blocks,
    stock_twin,
    training_step,
)
from sage_grpo.config.parse import parse
from sage_grpo.models.lora import POLICY
from sage_grpo.models.wan.backbone import Wan
from sage_grpo.models.wan.transformer import WanTransformer
from sage_grpo.parallel.ranks import join_ranks
from sage_grpo.tools.plan.memory import peak, swapped_bytes
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.train.build import build_trainer

PARTS = ("transformer", "image", "grpo")
LIMIT = 24e9  # bytes
CLIPS = 4
PROMPT = (
    "A red kite rises over a windy beach while two children run below it, wide shot, morning light."
)
ALWAYS = (
    "--report_to none --log_interval 1 --max_steps 1 --gradient_accumulation_steps 1 --save_interval 0 "
    f"--validation_interval 0 --validation_videos 0 --batch_size {CLIPS} --num_generations {CLIPS}"
)


class Case(NamedTuple):
    """What is measured of a model."""

    title: str
    recipe: str
    grid: tuple[int, int, int]  # latents of 81 x 480 x 832
    timestep_per_token: bool = False  # as the stock pipeline passes them
    flags: str = ""  # of the iteration, besides the recipe and ALWAYS
    parts: tuple[str, ...] = ("transformer", "grpo")
    limit: float | None = LIMIT  # bytes that torch may allocate in the iteration


CASES = {
    "wan21-1.3b": Case(
        title="Wan 2.1 1.3B",
        recipe="wan21_1gpu_24gb_lora",
        grid=(21, 60, 104),
        # larger than the recipe's
        flags="--num_frames 81 --height 480 --width 832 --keep_attention False",
    ),
    "wan22-ti2v-5b": Case(
        title="Wan 2.2 TI2V 5B",
        recipe="wan22_5b_1gpu_24gb_lora",
        grid=(21, 30, 52),
        timestep_per_token=True,
        parts=PARTS,
    ),
    "wan22-t2v-a14b": Case(
        title="Wan 2.2 A14B",
        recipe="wan22_a14b_8gpu_lora",
        grid=(21, 60, 104),
        flags="--gpus 1 --enable_fsdp False --num_frames 33",
        parts=("grpo",),  # each of its transformers is that of Wan 2.1 14B
        limit=None,
    ),
}
REHEARSED = "--num_frames 5 --height 32 --width 32 --num_sampling_steps 6 --lora_r 4 --dtype fp32 --device cpu"
TINY_GRID = (2, 4, 6)
STOCK_FORWARD = "forward, stock"
STOCK_STEP = "LoRA step, stock, checkpointed"


def transformer_rows(name: str, rehearse: bool, clean: bool = False) -> Results:
    """Rows of a table and findings about agreement. clean: whether the first frame has timestep 0."""
    bench = Bench(torch.device("cuda"), torch.bfloat16, repeat=5)
    sizes = MODELS[name].transformer
    grid = CASES[name].grid
    if rehearse:
        bench = Bench(torch.device("cpu"), torch.float32, repeat=1)
        sizes = TINY_TRANSFORMER
        grid = TINY_GRID
    device = bench.device
    model = random_model(sizes, device, bench.dtype, WanTransformer)
    twin = stock_twin(model, StockWan).with_tables(device)
    c = model.config

    generator = torch.Generator(device).manual_seed(1)
    video = torch.randn(1, c.in_channels, *grid, generator=generator, device=device)
    text = torch.randn(1, Wan.cross, c.text_dim, generator=generator, device=device)
    video, text = video.to(bench.dtype), text.to(bench.dtype)
    text[:, 150:] = 0
    timestep = torch.tensor([731.0], device=device)
    stock_timestep = timestep
    if CASES[name].timestep_per_token:
        frames, rows, columns = grid
        per_frame = rows * columns // 4
        stock_timestep = timestep[:, None].repeat(1, frames * per_frame)
    if clean:
        timestep = torch.tensor([[0.0, 731.0]], device=device)
        stock_timestep[:, :per_frame] = 0
    facts = []

    def ours() -> Tensor:
        return model(video, timestep, text)

    def stock() -> Tensor:
        return twin(video, stock_timestep, text, return_dict=False)[0]

    with torch.no_grad():
        bench.run(STOCK_FORWARD, stock, 0)
        bench.run("forward, ours", ours, 0)
        plain = ours().float()
        facts.append(f"ours to stock: velocity {distance(plain, stock().float()):.2g} apart")
        set_blocks(model, compiled=True)
        bench.run("forward, ours, compiled", ours, 0)
        apart = distance(ours().float(), plain)
        facts.append(f"compiled to not compiled: velocity {apart:.2g} apart")
    stock_step(bench, twin, stock)
    adapted(model, bench.dtype, train_all=False, layers=Wan.lora_targets)
    steps = {
        "LoRA step, ours, compiled": False,
        "LoRA step, ours, compiled, attention kept": True,
    }
    for step, keep_attention in steps.items():
        set_blocks(model, recomputed=1.0, keep_attention=keep_attention, compiled=True)
        bench.run(step, training_step(ours, model), 0)
        facts.append(f"{step}: rollout to training {rollout_to_training(ours):.2g}")
    return {"rows": [asdict(row) for row in bench.rows], "facts": facts}


def stock_step(bench: Bench, twin: nn.Module, forward: Callable[[], Tensor]) -> None:
    """The stock model's LoRA step with all blocks recomputed."""
    adapted(twin, bench.dtype, train_all=False, layers=Wan.lora_targets)
    twin.enable_gradient_checkpointing()
    bench.run(STOCK_STEP, training_step(forward, twin.train()), 0)
    twin.eval().delete_adapters(POLICY)


def write_model(scratch: Path, name: str, rehearse: bool) -> Path:
    """Write a random model folder with its reward, unless an earlier call has; returns the folder."""
    folder = scratch / (f"{name}-tiny" if rehearse else name)
    if (folder / "model_index.json").is_file():
        return folder
    writer = Writer(torch.device("cpu" if rehearse else "cuda"))
    words = prompt_words()
    folder.mkdir(parents=True, exist_ok=True)  # an earlier call may have been stopped
    write_wan(folder, rehearse, words, writer, name)
    write_reward(folder / "VideoReward", rehearse, words, writer)
    writer.finish()
    link_experts(folder, name)
    write_index(folder, name)  # last: a folder with this file is complete
    return folder


def iteration(scratch: Path, name: str, rehearse: bool) -> Results:
    """One iteration inside the limit, and what the planner says of it."""
    case = CASES[name]
    model = write_model(scratch, name, rehearse)
    free()
    prompts = scratch / "prompts.txt"
    prompts.write_text(f"{PROMPT}\n")
    recipe = ROOT / "configs" / f"{case.recipe}.yaml"
    words = ["--config", recipe, "--pretrained_model_root", model]
    words += ["--train_prompts", prompts, "--validation_prompts", prompts]
    words += ["--output_dir", scratch / "run", "--overwrite"]
    words += [*ALWAYS.split(), *case.flags.split()]
    device = "cuda"
    if rehearse:
        words += REHEARSED.split()
        device = "cpu"
    elif case.limit is not None:
        memory = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(case.limit / memory)

    config = parse([str(word) for word in words])
    with join_ranks(600, sharded=config.enable_fsdp, device_type=device) as ranks:
        trainer = build_trainer(config, ranks)
        trainer.validation = None
        warmed = warm(trainer, two_streams=False)
        (record,), (inside,) = measure(trainer)
        trainer.run.close()
    plan = plan_of(config, 1)
    moment, planned = peak(plan)
    resolved = plan.config  # with the sizes that the recipe leaves to the model
    seconds = {phase: record[f"time/{phase}"] for phase in PHASES}
    return {
        "seconds_of": seconds,
        "forward": warmed.forward,
        "overhead": trainer_overhead(seconds, inside),
        "peak": record["memory/peak_gb"],
        "reserved": 0.0 if rehearse else torch.cuda.max_memory_reserved() / 1e9,
        "planned": planned / 1e9,
        "moment": moment,
        "clips_per_hour": 3600 * CLIPS / sum(seconds.values()),
        "deviation": record["policy/ratio_max_deviation"],
        "clip": [resolved.num_frames, resolved.height, resolved.width],
        "limit": case.limit,
        "host": swapped_bytes(plan) / 1e9,
    }


def page(results: Results) -> str:
    """The results as Markdown."""
    case = CASES[results.get("model", "wan21-1.3b")]
    lines = heading(case.title, results["about"])
    writers = {"transformer": transformer_page, "image": transformer_page, "grpo": iteration_page}
    for name, write in writers.items():
        if name not in case.parts:
            continue
        part = results["parts"].get(name)
        lines += ["", f"## {name}", ""]
        lines += write(part) if part and "error" not in part else failure(name, part)
    return wrapped(lines)


def transformer_page(part: dict[str, Any]) -> list[str]:
    """Times of forward and LoRA step against those of stock, and how far the velocities are apart."""
    medians = {row["name"]: statistics.median(row["milliseconds"]) for row in part["rows"]}
    rows = []
    for row in part["rows"]:
        name = row["name"]
        median = medians[name]
        stock = medians[STOCK_FORWARD if name.startswith("forward") else STOCK_STEP]
        spread = f"{min(row['milliseconds']):.0f} to {max(row['milliseconds']):.0f}"
        times = f"{stock / median:.2f}"
        rows.append(
            (name, f"{median:.0f} ({spread})", times, f"{row['first']:.1f}", f"{row['peak']:.1f}")
        )
    clip = "one clip of 81 x 480 x 832"
    head = (clip, "ms", "times as fast as stock", "first call, s", "peak GiB")
    return [*table(head, rows), "", *(f"- {fact}" for fact in part["facts"]), ""]


def iteration_page(part: dict[str, Any]) -> list[str]:
    """Seconds by phase, clips per hour, memory."""
    rows = []
    for phase in PHASES:
        seconds = part["seconds_of"][phase]
        rows.append((phase, f"{seconds:.2f}", f"{seconds / CLIPS:.2f}"))
    frames, height, width = part["clip"]
    limit = part.get("limit", LIMIT)
    limit = "no limit" if limit is None else f"limit {limit / 1e9:.0f} GB"
    return [
        *table(("phase", "s", "s per clip"), rows),
        "",
        f"- {CLIPS} clips of one prompt, {frames} x {height} x {width}, **{part['clips_per_hour']:.0f} clips per "
        f"GPU-hour**; the trainer adds {part['overhead']:.2%} to the transformer's time; a guided forward takes "
        f"{part['forward']:.2f} s.",
        f"- Peak {part['peak']:.1f} GB, reserved {part['reserved']:.1f} GB, {limit}; the planner expects "
        f"{part['planned']:.1f} GB in {part['moment']}, and {part.get('host', 0.0):.1f} GB of host memory for a "
        "transformer that waits.",
        f"- Largest deviation of the first ratio from 1: {part['deviation']:.3g}.",
        "",
    ]


def main(arguments: list[str] | None = None) -> None:
    options, parts = begin(__doc__, PARTS, page, arguments, list(CASES), writes=True)
    name = options.model
    rehearse = options.rehearse
    if options.write_only:
        write_model(options.scratch, name, rehearse)
        return
    parts.results.setdefault("about", about())
    parts.results["model"] = name
    measures = {
        "transformer": lambda _: transformer_rows(name, rehearse),
        "image": lambda _: transformer_rows(name, rehearse, clean=True),
        "grpo": lambda _: iteration(options.scratch, name, rehearse),
    }
    for part in CASES[name].parts:
        parts.run(part, options.limit, measures[part])
        free()
    parts.end()


if __name__ == "__main__":
    main()
