"""Wan 2.1 1.3B on one GPU: its transformer against stock diffusers, and a GRPO iteration inside 24 GB.

    python -m research.benchmarks.wan --output research/benchmarks/DATE-wan-h200.md

transformer  forward and LoRA step, ours and stock on the same weights, 81 x 480 x 832, bf16, one clip
grpo         one iteration of configs/wan21_1gpu_24gb_lora.yaml by the unmodified trainer, with the VAE and VideoAlign
             at full size, after every graph was compiled; torch may allocate 24 GB

Random weights. The page is written after each part. `--only NAME` runs one part, `--rehearse` tries the script with a
tiny model on the CPU.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from research.benchmarks.clips import warm
from research.benchmarks.grpo import IN_MODEL, PHASES, measure
from research.benchmarks.parts import ROOT, Results, about, begin, failure, heading, table, wrapped
from research.benchmarks.random_model import prompt_words
from research.benchmarks.random_reward import write_reward
from research.benchmarks.random_wan import TINY_TRANSFORMER, write_wan
from research.benchmarks.random_weights import Writer
from research.benchmarks.stock import StockWan
from research.benchmarks.transformer import (
    Bench,
    adapted,
    distance,
    free,
    random_model,
    set_blocks,
    stock_twin,
    training_step,
)
from sage_grpo.config.parse import parse
from sage_grpo.models.lora import POLICY
from sage_grpo.models.wan21.backbone import Wan21
from sage_grpo.models.wan21.folder import SMALL
from sage_grpo.models.wan21.transformer import WanTransformer
from sage_grpo.parallel.ranks import join_ranks
from sage_grpo.tools.plan.memory import peak
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.train.build import build_trainer

PARTS = ("transformer", "grpo")
CONFIG = ROOT / "configs" / "wan21_1gpu_24gb_lora.yaml"
LIMIT = 24e9  # bytes that torch may allocate in the iteration
CLIPS, PROMPT = (
    4,
    "A red kite rises over a windy beach while two children run below it, wide shot, morning light.",
)
ALWAYS = "--report_to none --log_interval 1 --max_steps 1 --gradient_accumulation_steps 1 --save_interval 0"
ALWAYS += (
    f" --validation_interval 0 --validation_videos 0 --batch_size {CLIPS} --num_generations {CLIPS}"
)
REHEARSED = "--num_frames 5 --height 32 --width 32 --num_sampling_steps 6 --lora_r 4 --dtype fp32 --device cpu"
GRID, TINY_GRID = (21, 60, 104), (2, 4, 6)  # latents of 81 x 480 x 832


def transformer_rows(rehearse: bool) -> Results:
    """Rows of a table and findings about agreement."""
    device = torch.device("cpu" if rehearse else "cuda")
    bench = Bench(
        device, torch.float32 if rehearse else torch.bfloat16, repeat=1 if rehearse else 5
    )
    model = random_model(
        TINY_TRANSFORMER if rehearse else SMALL, device, bench.dtype, WanTransformer
    )
    twin, c = stock_twin(model, StockWan).with_tables(device), model.config
    draw = torch.Generator(device).manual_seed(1)
    sizes = ((1, c.in_channels, *(TINY_GRID if rehearse else GRID)), (1, Wan21.cross, c.text_dim))
    video, text = (
        torch.randn(size, generator=draw, device=device).to(bench.dtype) for size in sizes
    )
    text[:, 150:] = 0
    timestep, facts = torch.tensor([731.0], device=device), []

    def ours() -> Tensor:
        return model(video, timestep, text)

    def stock() -> Tensor:
        return twin(video, timestep, text, return_dict=False)[0]

    with torch.no_grad():
        bench.run("forward, stock", stock, 0)
        bench.run("forward, ours", ours, 0)
        plain, theirs = ours().float(), stock().float()
        facts.append(f"ours to stock: velocity {distance(plain, theirs):.2g} apart")
        set_blocks(model, 0.0, False, True)
        bench.run("forward, ours, compiled", ours, 0)
        facts.append(
            f"compiled to not compiled: velocity {distance(ours().float(), plain):.2g} apart"
        )
    stock_step(bench, twin, stock)
    adapted(model, bench.dtype, False, Wan21.lora_targets)
    for name, keep in (
        ("LoRA step, ours, compiled", False),
        ("LoRA step, ours, compiled, attention kept", True),
    ):
        set_blocks(model, 1.0, keep, True)
        bench.run(name, training_step(ours, model), 0)
        with torch.no_grad():
            rollout = ours().float()
        facts.append(
            f"{name}: rollout to training {distance(ours().detach().float(), rollout):.2g}"
        )
    return {"rows": [asdict(row) for row in bench.rows], "facts": facts}


def stock_step(bench: Bench, twin: nn.Module, forward: Callable[[], Tensor]) -> None:
    """The stock model's LoRA step with all blocks recomputed."""
    adapted(twin, bench.dtype, False, Wan21.lora_targets)
    twin.enable_gradient_checkpointing()
    bench.run("LoRA step, stock, checkpointed", training_step(forward, twin.train()), 0)
    twin.eval().delete_adapters(POLICY)


def write_model(folder: Path, rehearse: bool) -> None:
    """A random model folder with its reward, unless an earlier call has written it."""
    if (folder / "model_index.json").is_file():
        return
    writer, words = Writer(torch.device("cpu" if rehearse else "cuda")), prompt_words()
    folder.mkdir(parents=True)
    write_wan(folder, rehearse, words, writer)
    write_reward(folder / "VideoReward", rehearse, words, writer)
    writer.finish()
    (folder / "model_index.json").write_text('{"_class_name": "WanPipeline"}\n')  # it is complete


def iteration(scratch: Path, rehearse: bool) -> Results:
    """One iteration inside the limit, and what the planner says of it."""
    write_model(scratch / "model", rehearse)
    free()
    words = [
        "--config",
        CONFIG,
        "--pretrained_model_root",
        scratch / "model",
        "--output_dir",
        scratch / "run",
    ]
    prompts = scratch / "prompts.txt"
    prompts.write_text(f"{PROMPT}\n")
    words += ["--train_prompts", prompts, "--validation_prompts", prompts]
    flags = [
        *map(str, words),
        "--overwrite",
        *ALWAYS.split(),
        *(REHEARSED.split() if rehearse else []),
    ]
    if not rehearse:
        torch.cuda.set_per_process_memory_fraction(
            LIMIT / torch.cuda.get_device_properties(0).total_memory
        )
    config = parse(flags)
    with join_ranks(
        600, sharded=config.enable_fsdp, device_type="cpu" if rehearse else "cuda"
    ) as ranks:
        trainer = build_trainer(config, ranks)
        trainer.validation = None
        forward, *_ = warm(trainer)
        (record,), (inside,) = measure(trainer)
        trainer.run.close()
    moment, planned = peak(plan_of(config, 1))
    seconds = {phase: record[f"time/{phase}"] for phase in PHASES}
    spent, needed = (sum(of[phase] for phase in IN_MODEL) for of in (seconds, inside))
    return {
        "seconds_of": seconds, "forward": forward, "overhead": spent / needed - 1,
        "peak": record["memory/peak_gb"], "reserved": 0.0 if rehearse else torch.cuda.max_memory_reserved() / 1e9,
        "planned": planned / 1e9, "moment": moment, "clips_per_hour": 3600 * CLIPS / sum(seconds.values()),
        "deviation": record["policy/ratio_max_deviation"], "clip": [config.num_frames, config.height, config.width],
    }  # fmt: skip


def page(results: Results) -> str:
    """The results as Markdown."""
    lines = heading("Wan 2.1 1.3B", results["about"])
    for name, write in (("transformer", transformer_page), ("grpo", iteration_page)):
        part = results["parts"].get(name)
        lines += [
            "",
            f"## {name}",
            "",
            *(write(part) if part and "error" not in part else failure(name, part)),
        ]
    return wrapped(lines)


def transformer_page(part: dict[str, Any]) -> list[str]:
    middle = {row["name"]: statistics.median(row["milliseconds"]) for row in part["rows"]}
    rows = []
    for row in part["rows"]:
        base = middle[
            "forward, stock"
            if row["name"].startswith("forward")
            else "LoRA step, stock, checkpointed"
        ]
        low, high, own = min(row["milliseconds"]), max(row["milliseconds"]), middle[row["name"]]
        spread = f"{own:.0f} ({low:.0f} to {high:.0f})"
        rows.append(
            (row["name"], spread, f"{base / own:.2f}", f"{row['first']:.1f}", f"{row['peak']:.1f}")
        )
    head = (
        "one clip of 81 x 480 x 832",
        "ms",
        "times as fast as stock",
        "first call, s",
        "peak GiB",
    )
    return [*table(head, rows), "", *(f"- {fact}" for fact in part["facts"]), ""]


def iteration_page(part: dict[str, Any]) -> list[str]:
    rows = [
        (phase, f"{part['seconds_of'][phase]:.2f}", f"{part['seconds_of'][phase] / CLIPS:.2f}")
        for phase in PHASES
    ]
    return [
        *table(("phase", "s", "s per clip"), rows), "",
        f"- {CLIPS} clips of one prompt, **{part['clips_per_hour']:.0f} clips per GPU-hour**; the trainer adds "
        f"{part['overhead']:.2%} to the transformer's time; a guided forward takes {part['forward']:.2f} s.",
        f"- Peak {part['peak']:.1f} GB, reserved {part['reserved']:.1f} GB, limit {LIMIT / 1e9:.0f} GB; the planner "
        f"expects {part['planned']:.1f} GB in {part['moment']}.",
        f"- Largest deviation of the first ratio from 1: {part['deviation']:.3g}.", "",
    ]  # fmt: skip


def main(words: list[str] | None = None) -> None:
    options, parts = begin(__doc__, PARTS, page, words)
    parts.results.setdefault("about", about())
    parts.run("transformer", options.limit, lambda _: transformer_rows(options.rehearse))
    free()
    parts.run("grpo", options.limit, lambda _: iteration(options.scratch, options.rehearse))
    parts.end()


if __name__ == "__main__":
    main()
