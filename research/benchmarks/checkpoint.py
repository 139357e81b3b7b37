"""What fraction of a run's time do checkpoints take?

    python -m research.benchmarks.checkpoint --pairs 8 --output research/benchmarks/results/DATE-checkpoint-cost.md

One run in blocks of `save_interval` iterations. Every second block ends with a regular checkpoint, the others do not:
so intermittent load slows both kinds down, and the difference includes what a save costs the iterations after it. All
other flags go to post_train.py.
"""

import argparse
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from sage_grpo.config.parse import parse
from sage_grpo.intervals import interval
from sage_grpo.parallel.ranks import join_ranks
from sage_grpo.train.build import build_trainer
from sage_grpo.train.checkpoint_folders import list_checkpoints
from sage_grpo.train.trainer import Trainer


class Block(NamedTuple):
    """Seconds for some iterations and for the save after them, 0 if there was none."""

    iterations: float
    save: float


def measure(trainer: Trainer) -> list[Block]:
    """Train; returns the blocks in order, alternating with and without a save."""
    blocks: list[Block] = []
    save = trainer.saves.begin
    block_begin = time.perf_counter()

    def save_every_second(must: bool = True) -> None:
        nonlocal block_begin
        save_begin = time.perf_counter()
        if len(blocks) % 2 == 0:
            save(must)
        end = time.perf_counter()
        blocks.append(Block(iterations=save_begin - block_begin, save=end - save_begin))
        block_begin = end

    trainer.saves.begin = save_every_second
    trainer.train()
    return blocks


def report(blocks: Sequence[Block], every: int, megabytes: float, about: str) -> str:
    """The results as Markdown; every: iterations of a block."""
    pairs = list(zip(blocks[2::2], blocks[3::2], strict=True))  # the first two warm up
    save = statistics.median(saved.save for saved, _ in pairs)
    plain = statistics.median(without.iterations for _, without in pairs)
    longer = [
        100 * (saved.save + saved.iterations - without.iterations) / without.iterations
        for saved, without in pairs
    ]
    added = interval(longer)
    text = (
        f"A checkpoint of {megabytes:.1f} MB takes {save:.3f} s in the median, every {every} iterations of "
        f"{plain / every:.2f} s: **{100 * save / plain:.2f} %** of the time. Blocks with a save took {added.mean:+.2f} "
        f"± {added.half:.2f} % longer than their neighbors without (95 % interval)."
    )
    table = ["| iterations, s | and save, s | iterations without save, s |", "|---:|---:|---:|"]
    for saved, without in pairs:
        table.append(f"| {saved.iterations:.2f} | {saved.save:.3f} | {without.iterations:.2f} |")
    title = f"# Cost of checkpoints, {time.strftime('%Y-%m-%d')}"
    return "\n\n".join([title, about, text, "\n".join(table)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", default="configs/tiny_cpu.yaml", help="recipe of post_train.py")
    add("--pairs", type=int, default=8, help="pairs of blocks, after one that warms up")
    add("--save_interval", type=int, default=10, help="iterations of a block")
    add("--output", type=Path, help="Markdown file for the result")
    flags, others = parser.parse_known_args(arguments)
    every = flags.save_interval
    steps = 2 * (flags.pairs + 1) * every
    fixed = (
        f"--validate_at_step0 False --report_to none --max_steps {steps} --save_interval {every}"
    )

    Path("outputs").mkdir(exist_ok=True)
    # In the folder of runs: /tmp may not be on a disk.
    with tempfile.TemporaryDirectory(dir="outputs") as folder:
        config = parse(["--config", flags.config, *others, *fixed.split(), "--output_dir", folder])
        with join_ranks(config.start_timeout) as ranks:
            trainer = build_trainer(config, ranks)
            trainer.validation = None
            blocks = measure(trainer)
            trainer.run.close()
        newest = list_checkpoints(Path(folder) / "checkpoints")[-1]
        megabytes = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()) / 1e6
    command = shlex.join(["python", "-m", "research.benchmarks.checkpoint", *arguments])
    about = (
        f"    {command}\n\n{os.cpu_count()} CPU cores ({platform.machine()}), torch {torch.__version__}, "
        f"Python {platform.python_version()}."
    )
    page = report(blocks, every, megabytes, about)
    print(page)
    if flags.output:
        flags.output.write_text(page)


if __name__ == "__main__":
    main()
