"""Is the learning real? Trains with the true reward and with shuffled rewards over several seeds, and compares.

    python -m research.studies.learning_check --config configs/tiny_cpu.yaml --seeds 1 2 3 \\
        --output outputs/learning_check

Shuffled rewards keep every number but assign it to another clip: improvement under them is not learning. Each run is
validated before and after on the same held-out prompts and noise; finished runs are kept and not repeated. All other
flags go to post_train.py.
"""

import argparse
import copy
import json
from pathlib import Path

import torch
from torch import Tensor

from sage_grpo.config.parse import parse
from sage_grpo.parallel.ranks import join_ranks
from sage_grpo.rewards.base import Composite, Scores
from sage_grpo.runs.history import read_run
from sage_grpo.tools.paired import compared
from sage_grpo.tools.report.page import before_after
from sage_grpo.train.build import build_trainer
from sage_grpo.train.trainer import Trainer

KINDS = ("true", "shuffled")
METRICS = ("total reward", "gold match", "gold distance", "gold prompt distance")


def shuffled(reward: Composite, trainer: Trainer) -> Composite:
    """A reward whose totals are shuffled among the clips of the batch; validation keeps the true reward."""
    copied = copy.copy(reward)

    def deal(clips: list[Tensor], prompts: list[str], fps: float) -> Scores:
        scores = reward.score(clips, prompts, fps)
        order = torch.randperm(len(clips), generator=torch.Generator().manual_seed(trainer.step))
        return Scores(scores.total[order], scores.named, scores.errors)

    copied.score = deal
    return copied


def train(kind: str, seed: int, folder: Path, flags: list[str]) -> None:
    """Make one run, with the `true` or the `shuffled` reward."""
    place = ["--output_dir", str(folder), "--overwrite"]
    config = parse([*flags, *place, "--seed", str(seed), "--validate_at_step0", "True"])
    with join_ranks(1800) as ranks:
        trainer = build_trainer(config, ranks)
        if kind == "shuffled":
            trainer.reward = shuffled(trainer.reward, trainer)
        trainer.train()
        trainer.run.close()
    (folder / "done").touch()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="rewards to train with")
    add("--output", type=Path, default=Path("outputs/learning_check"), help="folder of the runs")
    args, flags = parser.parse_known_args()
    results: dict[str, dict] = {}
    for seed in args.seeds:
        for kind in args.kinds:
            folder = args.output / f"{kind}-{seed}"
            if not (folder / "done").is_file():
                print(f"{kind} reward, seed {seed}")
                train(kind, seed, folder, flags)
            results[folder.name] = changes(folder)
    (args.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print_table(results)


def changes(folder: Path) -> dict[str, dict]:
    """By metric, the last validation of a run against its first, clip by clip."""
    systems = compared(before_after(read_run(folder)), total=True)["systems"]
    before, after = (system["columns"] for system in systems.values())
    return {
        name: after[name] | {"before": before[name]["mean"]} for name in METRICS if name in after
    }


def print_table(results: dict[str, dict]) -> None:
    print("\n| run | " + " | ".join(METRICS) + " |")
    print("|" + "---|" * (len(METRICS) + 1))
    for name, metrics in results.items():
        cells = []
        for metric in metrics.values():
            change = f"{metric['difference']:+.3f} ± {metric['difference_half']:.3f}"
            cells.append(f"{metric['before']:.3f} -> {metric['mean']:.3f} ({change})")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
