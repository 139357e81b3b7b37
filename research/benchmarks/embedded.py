"""Updates per minute of the embedded model on one GPU, side by side in one run.

    python -m research.benchmarks.embedded --output research/benchmarks/results/DATE-embedded-h200.md \\
        --config configs/tiny_gpu.yaml --device cuda

A row is the median over the second half of the iterations, without validations and the oracle. Flags of post_train.py
apply to all rows.
"""

import datetime
import gc
import platform
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from research.benchmarks.clips import options_of
from research.benchmarks.grpo import PHASES
from sage_grpo.config.parse import parse
from sage_grpo.parallel.ranks import Ranks, join_ranks
from sage_grpo.runs.history import read_run
from sage_grpo.train.build import build_trainer

WAYS = {
    "one prompt per forward": "--prompts_per_forward 1",
    "recipe": "",
    "recipe, CUDA graphs": "--cuda_graphs True",
}
FIXED = "--report_to none --log_interval 1 --save_interval 0 --validation_interval 0 --validation_videos 0"


def run(flags: list[str], ranks: Ranks, folder: Path) -> dict[str, float]:
    """Median seconds of each phase, the largest deviation of a first ratio from 1, and the seconds of the whole run."""
    config = parse([*flags, *FIXED.split(), "--output_dir", str(folder)])
    begin = time.perf_counter()
    trainer = build_trainer(config, ranks)
    trainer.validation = None
    trainer.gold = None
    trainer.train()
    spent = time.perf_counter() - begin
    lines = read_run(folder).full_lines
    half = lines[len(lines) // 2 :]
    medians = {phase: statistics.median(line[f"time/{phase}"] for line in half) for phase in PHASES}
    deviation = max(line["policy/ratio_max_deviation"] for line in half)
    return medians | {"deviation": deviation, "in all": spent}


def row(name: str, measured: dict[str, float], first_total: float) -> str:
    """A table row; first_total: seconds of an update in the first row."""
    total = sum(measured[phase] for phase in PHASES)
    cells = [name, *(f"{measured[phase]:.3f}" for phase in PHASES)]
    cells += [
        f"{total:.3f}",
        f"{60 / total:.0f}",
        f"**{first_total / total:.1f}**",
        f"{measured['deviation']:.2g}",
        f"{measured['in all']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> None:
    options, flags = options_of(__doc__, WAYS, arguments)
    titles = ["way", *(f"{phase}, s" for phase in PHASES), "an update, s", "updates per minute"]
    titles += ["times the first row", "largest ratio deviation", "whole run, s"]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    lines = [
        f"# Updates per minute of the embedded model, {where}, {datetime.date.today()}", "",
        f"    {shlex.join(['python', *sys.orig_argv[1:]])}", "",
        f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads.", "",
        f"| {' | '.join(titles)} |", "|---" * len(titles) + "|",
    ]  # fmt: skip
    first_total = 0.0
    device = parse(flags).device
    with tempfile.TemporaryDirectory() as scratch, join_ranks(600, device_type=device) as ranks:
        for name in options.ways:
            folder = Path(scratch) / name.replace(" ", "_")
            measured = run([*flags, *WAYS[name].split()], ranks, folder)
            if not first_total:
                first_total = sum(measured[phase] for phase in PHASES)
            lines.append(row(name, measured, first_total))
            print(lines[-1], flush=True)
            options.output.write_text("\n".join(lines) + "\n")  # after each way: the next may fail
            gc.collect()
            torch.compiler.reset()


if __name__ == "__main__":
    main()
