"""Does a long run leak? Trains a miniature model and counts memory, open files and threads after every iteration.

    python -m tests.chaos.soak --iterations 300 --output outputs/soak
    python -m tests.chaos.soak --ranks 2 --output outputs/soak2

A validation and a checkpoint every 10 iterations, TensorBoard. Writes each rank's samples as CSV, soak.json with the
slopes, and soak.png. Memory is the process's resident memory, allocated is what it requested; the difference is malloc
fragmentation. Slopes are fitted to means over blocks of 20 iterations, which all contain the same validations and
checkpoints, after two fifths of the run: torch keeps its last 2000 collectives. Needs glibc 2.33.
"""

import argparse
import csv
import ctypes
import gc
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from transformers.utils.logging import disable_progress_bar

from sage_grpo.config.parse import parse
from sage_grpo.files.json_files import finite
from sage_grpo.intervals import student_95
from sage_grpo.parallel.ranks import join_ranks
from sage_grpo.tools.figure_style import BLUE, GREEN, ORANGE, PURPLE, STYLE
from sage_grpo.train.build import build_trainer
from tests.chaos.world import write_model

FLAGS = """
    --batch_size 2 --num_generations 2 --num_sampling_steps 2 --num_frames 5 --guidance_scale 1 --learning_rate 1e-4
    --kl_weight 0.1 --ema_decay 0.9 --validation_interval 10 --validation_num_inference_steps 2 --save_interval 10
    --keep_checkpoints 2 --report_to tensorboard --reward_model shapes --height 16 --width 16
    --validation_fixed_size 16x16
"""
COLUMNS = {
    "rss": "memory, MB",
    "allocated": "allocated, MB",
    "files": "open files",
    "threads": "threads",
}
COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
BLOCK = 20  # iterations


class Malloc(ctypes.Structure):
    """The result of glibc's mallinfo2, in bytes."""

    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def allocated() -> float:
    """MB that this process has allocated with malloc and not freed."""
    call = ctypes.CDLL(None).mallinfo2
    call.restype = Malloc
    found = call()
    return (found.uordblks + found.hblkhd) / 2**20


def sample() -> dict[str, float]:
    """Current counts for this process, after garbage collection."""
    gc.collect()
    text = Path("/proc/self/status").read_text()
    memory, threads = (
        int(re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)[1]) for name in ("VmRSS", "Threads")
    )
    files = len(os.listdir("/proc/self/fd")) - 1  # without the one used for listing
    return {"rss": memory / 1024, "allocated": allocated(), "files": files, "threads": threads}


def train(flags: Sequence[str], output: Path) -> bool:
    """Train and write this rank's samples; returns whether this rank continues once all have written."""
    config = parse(flags)
    with join_ranks(config.start_timeout) as ranks:
        trainer, samples = build_trainer(config, ranks), []
        finish = trainer.finish_iteration

        def finish_and_sample() -> None:
            finish()
            samples.append({"iteration": trainer.step} | sample())

        trainer.finish_iteration = finish_and_sample
        gc.freeze()  # existing objects stay: no need to scan them in every collection
        try:
            trainer.train()
        finally:
            gc.unfreeze()
            trainer.run.close()
        with (output / f"rank-{ranks.world_rank}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["iteration", *COLUMNS])
            writer.writeheader()
            writer.writerows(samples)
        ranks.barrier()
        return ranks.is_first


def read_samples(file: Path) -> dict[str, np.ndarray]:
    """Columns (N,) by name."""
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    return {name: np.array([float(row[name]) for row in rows]) for name in ("iteration", *COLUMNS)}


def slope(values: np.ndarray) -> tuple[float, float]:
    """Slope per iteration of values (N,), with its 95 % interval; NaN if there are too few."""
    kept = values[2 * len(values) // 5 :]
    blocks = kept[len(kept) % BLOCK :].reshape(-1, BLOCK).mean(1)
    if len(blocks) < 4:
        return math.nan, math.nan
    x = BLOCK * (np.arange(len(blocks)) - (len(blocks) - 1) / 2)
    steep = float((x * blocks).sum() / (x * x).sum())
    rest = blocks - blocks.mean() - steep * x
    freedom = len(blocks) - 2
    return steep, student_95(freedom) * float(np.sqrt((rest @ rest) / freedom / (x * x).sum()))


def summary(samples: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """First, last and largest value of each column, and its slope per 1000 iterations."""
    found = {}
    for name in COLUMNS:
        values, (steep, half) = samples[name], slope(samples[name])
        found[name] = {"first": values[0], "last": values[-1], "largest": values.max()}
        found[name] |= {"slope": 1000 * steep, "half": 1000 * half}
    return found


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    rows = [
        "| rank | | first | last | largest | slope per 1000 iterations |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for rank, columns in found.items():
        for name, v in columns.items():
            cells = [f"{v[key]:.1f}" for key in ("first", "last", "largest")]
            rows.append(
                f"| {rank} | {COLUMNS[name]} | {' | '.join(cells)} | {v['slope']:+.2f} ± {v['half']:.2f} |"
            )
    return "\n".join(rows)


def draw(runs: dict[str, dict[str, np.ndarray]], file: Path) -> None:
    with matplotlib.rc_context(fname=STYLE):
        figure = Figure(figsize=(7.5, 2.2), layout="constrained")
        panels = {
            "memory, MB": ("rss", "allocated"),
            "open files": ("files",),
            "threads": ("threads",),
        }
        for axes, (title, names) in zip(figure.subplots(1, 3), panels.items(), strict=True):
            for number, (rank, samples) in enumerate(runs.items()):
                for name, style in zip(names, ("-", ":"), strict=False):
                    words = {
                        "color": COLOURS[number % len(COLOURS)],
                        "linestyle": style,
                        "linewidth": 1,
                    }
                    label = f"rank {rank}" + (", allocated" if name == "allocated" else "")
                    axes.plot(samples["iteration"], samples[name], label=label, **words)
            axes.set_ylim(0, 1.15 * max(samples[names[0]].max() for samples in runs.values()))
            axes.set_title(title, loc="left", fontsize=9)
            axes.set_xlabel("iteration")
        figure.axes[0].legend(loc="lower right", fontsize=7)
        figure.savefig(file, dpi=90)


def report(output: Path) -> None:
    runs = {
        file.stem.removeprefix("rank-"): read_samples(file)
        for file in sorted(output.glob("rank-*.csv"))
    }
    found = {rank: summary(samples) for rank, samples in runs.items()}
    (output / "soak.json").write_text(json.dumps(finite(found), indent=1) + "\n")
    draw(runs, output / "soak.png")
    print(table(found))


def read_flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("outputs/soak"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = read_flags(arguments)
    disable_progress_bar()  # the one for weights
    if "RANK" not in os.environ:
        if args.output.exists():
            print(
                f"soak.py: --output {args.output} exists; name another folder, or delete it",
                file=sys.stderr,
            )
            return 2
        write_model(args.output / "model")
        if args.ranks > 1:
            launcher = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc_per_node",
                str(args.ranks),
            ]
            os.execv(sys.executable, [sys.executable, *launcher, __file__, *arguments])
    own = {
        "pretrained_model_root": args.output / "model",
        "output_dir": args.output / "run",
        "max_steps": args.iterations,
    }
    if train(
        [*FLAGS.split(), *(word for k, v in own.items() for word in (f"--{k}", str(v)))],
        args.output,
    ):
        report(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
