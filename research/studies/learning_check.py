"""Is the learning real? Trains with the true reward and with shuffled rewards over several seeds, and compares.

    python -m research.studies.learning_check --config configs/tiny_cpu.yaml --seeds 1 2 3 --output outputs/learning_check

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

METRICS = ("total reward", "gold match", "gold distance", "gold prompt distance")


def shuffled(reward: Composite, trainer: Trainer) -> Composite:
    """A reward whose totals are shuffled among the clips of the batch; validation keeps the true reward."""
    copied, score = copy.copy(reward), reward.score

    def deal(clips: list[Tensor], prompts: list[str], fps: float) -> Scores:
        scores = score(clips, prompts, fps)
        order = torch.randperm(len(clips), generator=torch.Generator().manual_seed(trainer.step))
        return Scores(scores.total[order], scores.named, scores.errors)

    copied.score = deal
    return copied


def train(kind: str, seed: int, folder: Path, flags: list[str]) -> None:
    run = [
        "--output_dir",
        str(folder),
        "--seed",
        str(seed),
        "--overwrite",
        "--validate_at_step0",
        "True",
    ]
    with join_ranks(1800) as ranks:
        trainer = build_trainer(parse([*flags, *run]), ranks)
        if kind == "shuffled":
            trainer.reward = shuffled(trainer.reward, trainer)
        trainer.train()
        trainer.run.close()
    (folder / "done").touch()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--kinds", nargs="+", choices=("true", "shuffled"), default=["true", "shuffled"]
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/learning_check"))
    args, flags = parser.parse_known_args()
    results: dict[str, dict] = {}
    for seed in args.seeds:
        for kind in args.kinds:
            folder = args.output / f"{kind}-{seed}"
            if not (folder / "done").is_file():
                print(f"{kind} reward, seed {seed}")
                train(kind, seed, folder, flags)
            before, after = compared(before_after(read_run(folder)), total=True)["systems"].values()
            first, last = before["columns"], after["columns"]
            results[folder.name] = {
                n: last[n] | {"before": first[n]["mean"]} for n in METRICS if n in last
            }
    (args.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print("\n| run | " + " | ".join(METRICS) + " |\n|" + "---|" * (len(METRICS) + 1))
    for name, row in results.items():
        cells = [
            f"{m['before']:.3f} -> {m['mean']:.3f} ({m['difference']:+.3f} ± {m['difference_half']:.3f})"
            for m in row.values()
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
