"""Breaks training runs at random moments, restarts them as an operator would, and checks that nothing was lost.

    python -m tests.chaos.chaos --seed 0 --output outputs/chaos
    python -m tests.chaos.chaos --faults 6 --kinds litter link_planted --output outputs/chaos

Each run is `post_train.py` on a miniature model under torchrun with two ranks, and gets up to five faults, all drawn
from the seed: which of `faults.py`, when, on which rank. torchrun restarts ranks that die; once it has exited too, the
same command is run again, until status.json says done. The result must then match an unbroken run bit for bit: its last
checkpoint and the metrics of every iteration; and all its checkpoints must be complete. Exit code 0: all runs passed.
"""

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from sage_grpo.files import manifest
from sage_grpo.runs.history import read_run
from sage_grpo.train.checkpoint_folders import list_checkpoints
from sage_grpo.train.guards import heard
from tests.chaos.faults import KINDS, Chaos, Fault, Outcome, canary_changes
from tests.chaos.world import MoodyReward, Stuck, Training, own_disk, serving, write_model

# Metrics that need not be equal: times, memory, and the scores that every start takes again.
LEFT_OUT = ("time", "memory", "signal/rescoring", "signal/call_")
LAYOUTS = {
    "full-dp": "",
    "full-fsdp": "--enable_fsdp True",
    "lora-dp": "--use_lora True --lora_r 4",
    "lora-fsdp": "--use_lora True --lora_r 4 --enable_fsdp True",
}
FLAGS = """
    --batch_size 2 --num_generations 2 --num_sampling_steps 2 --num_frames 5 --guidance_scale 1 --learning_rate 1e-3
    --kl_weight 0.1 --update_ref_model_step 3 --ema_decay 0.9 --validation_interval 5 --validation_num_inference_steps 2
    --collective_timeout 8 --max_reward_failures 0 --save_interval 2 --keep_checkpoints 3 --resume_from_checkpoint auto
    --height 16 --width 16
"""
FAULTS_PER_RUN, STEPS_PER_FAULT = 5, 4


@dataclass(frozen=True)
class Plan:
    """The faults of one run."""

    layout: str
    faults: tuple[Fault, ...]


def draw_plans(seed: int, count: int, kinds: Sequence[str], ranks: int) -> list[Plan]:
    """Draw every kind about equally often, layouts in turn; the same seed gives the same plans."""
    rng, pool, plans = random.Random(seed), [], []
    while len(pool) < count:
        pool += rng.sample(kinds, len(kinds))
    layouts = rng.sample(list(LAYOUTS), len(LAYOUTS))
    for start in range(0, count, FAULTS_PER_RUN):
        faults = []
        for number, kind in enumerate(pool[start : min(start + FAULTS_PER_RUN, count)]):
            step = number * STEPS_PER_FAULT + rng.randint(1, STEPS_PER_FAULT)
            chance = (rng.random(), rng.randrange(ranks), rng.getrandbits(32))
            faults.append(Fault(kind, rng.choice(KINDS[kind]), step, *chance))
        plans.append(Plan(layouts[len(plans) % len(layouts)], tuple(faults)))
    return plans


class Campaign:
    """Runs one plan after another."""

    def __init__(self, output: Path, ranks: int, steps: int, reward: MoodyReward, url: str) -> None:
        self.output, self.ranks, self.reward = output, ranks, reward
        self.flags = [*write_model(output / "model"), *FLAGS.split(), "--max_steps", str(steps)]
        self.flags += ["--reward_model", "remote", "--remote_reward_url", url]
        self.paces: dict[str, tuple[float, float]] = {}

    def break_run(self, name: str, plan: Plan, tell: Callable[[Outcome], None]) -> list[str]:
        """Break a run and let it finish; returns how it differs from the unbroken one."""
        flags, reference = (
            [*self.flags, *LAYOUTS[plan.layout].split()],
            self.output / f"unbroken-{plan.layout}",
        )
        if plan.layout not in self.paces:
            self.paces[plan.layout] = train_unbroken(Training(reference, flags, self.ranks))
        folder = self.output / name
        with own_disk(folder, any(fault.kind == "full_disk" for fault in plan.faults)) as disk:
            chaos = Chaos(
                Training(folder, flags, self.ranks), self.reward, self.paces[plan.layout], disk
            )
            try:
                for outcome in chaos.outcomes(plan.faults):
                    tell(outcome)
            except Stuck as error:
                return [str(error)]
            return differences(folder, reference)


def train_unbroken(training: Training) -> tuple[float, float]:
    """Train the reference run; returns seconds of startup and of an iteration."""
    begun = time.monotonic()
    training.launch()
    try:
        training.wait("the first iteration", lambda: training.ended or training.starts)
        start = time.monotonic() - begun
        training.wait("the end of the unbroken run", lambda: training.ended)
    finally:
        training.kill_all()
    if training.launcher.returncode:
        raise Stuck(
            f"the unbroken run ended with {training.launcher.returncode}: {training.said[-2000:]}"
        )
    return start, (time.monotonic() - begun - start) / training.step


def differences(run: Path, reference: Path) -> list[str]:
    """Where a run differs from the unbroken one or is incomplete; empty if it is bit-identical."""
    wrong = [f"{path} is left" for path in (run / "checkpoints").glob("*.tmp")]
    wrong += canary_changes(run)
    for path in list_checkpoints(run / "checkpoints"):
        try:
            manifest.check(path)
        except manifest.Damaged as error:
            wrong.append(str(error))
    (*_, mine), (*_, other) = (
        list_checkpoints(run / "checkpoints"),
        list_checkpoints(reference / "checkpoints"),
    )
    for name in sorted(
        {str(file.relative_to(p)) for p in (mine, other) for file in p.rglob("*.safetensors")}
    ):
        wrong += different_tensors(mine / name, other / name)
    ours, theirs = (
        json.loads((path / "trainer" / "state.json").read_text()) for path in (mine, other)
    )
    wrong += [
        f"{key} of {mine / 'trainer' / 'state.json'} differs"
        for key in theirs
        if ours.get(key) != theirs[key]
    ]
    return wrong + different_metrics(run, reference)


def different_tensors(file: Path, other: Path) -> list[str]:
    if not (file.is_file() and other.is_file()):
        return [f"{file} or {other} is missing"]
    one, two = load_file(file), load_file(other)
    names = sorted({*one, *two})
    return [
        f"{name} in {file} differs" for name in names if not same_bits(one.get(name), two.get(name))
    ]


def same_bits(one: Tensor | None, two: Tensor | None) -> bool:
    if one is None or two is None or (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))


def different_metrics(run: Path, reference: Path) -> list[str]:
    """Iterations and validations whose line is missing or differs, apart from what LEFT_OUT names."""

    def numbers(folder: Path) -> dict[str, dict[str, Any]]:
        run = read_run(folder)
        kinds = {"train": run.full_lines, "validations": run.validations}
        lines = [(f"{kind} {line['step']}", line) for kind in kinds for line in kinds[kind]]
        return {
            name: {k: v for k, v in line.items() if not k.startswith(LEFT_OUT)}
            for name, line in lines
        }

    ours, theirs = numbers(run), numbers(reference)
    names = sorted({*ours, *theirs})
    return [f"the metrics of {name} differ" for name in names if ours.get(name) != theirs.get(name)]


def table(outcomes: Sequence[Outcome], failed: Mapping[str, Sequence[str]]) -> str:
    rows = [
        "| run | fault | how it ended | resumed after | seconds | bit-equal |",
        "|---|---|---|---:|---:|---|",
    ]
    for o in outcomes:
        cells = [
            o.run,
            o.fault,
            o.ended,
            "" if o.resumed is None else str(o.resumed),
            f"{o.seconds:.1f}",
        ]
        rows.append(
            "| " + " | ".join([*cells, o.wrong or ("no" if failed[o.run] else "yes")]) + " |"
        )
    return "\n".join(rows)


def read_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=len(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("outputs/chaos"))
    args = parser.parse_args(arguments)
    if args.ranks < 2 and "hang_rank" in args.kinds:
        parser.error("--kinds names hang_rank, but with --ranks 1 nobody is left to notice it")
    if args.output.exists():
        parser.error(f"--output {args.output} exists; name another folder, or delete it")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = read_flags(arguments)
    plans = draw_plans(args.seed, args.faults, args.kinds, args.ranks)
    steps = STEPS_PER_FAULT * (1 + max(len(plan.faults) for plan in plans))
    outcomes: list[Outcome] = []
    failed: dict[str, list[str]] = {}
    disable_progress_bar()  # the one for writing weights
    told, bar = (
        heard(lambda *_: sys.exit(143), [signal.SIGTERM]),
        tqdm(total=args.faults, unit="fault"),
    )
    with (
        told,
        bar,
        serving(reward := MoodyReward()) as url,
    ):  # when told to stop, it still stops what it started

        def tell(outcome: Outcome) -> None:
            outcomes.append(outcome)
            bar.write(str(outcome))
            bar.update()

        campaign = Campaign(args.output.resolve(), args.ranks, steps, reward, url)
        for number, plan in enumerate(plans, 1):
            name = f"run-{number}-{plan.layout}"
            failed[name] = campaign.break_run(name, plan, tell)
            bar.write(f"{name}: {'; '.join(failed[name][:3]) or 'bit-equal to the unbroken run'}")
    print(table(outcomes, failed))
    results = {"outcomes": [asdict(outcome) for outcome in outcomes], "differences": failed}
    (args.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return int(any(failed.values()) or any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
