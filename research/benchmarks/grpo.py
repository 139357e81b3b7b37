"""A complete full-size GRPO iteration on one GPU: cost of each phase, and the trainer's overhead over the model.

    python -m research.benchmarks.random_model --output /tmp/random_model
    python -m research.benchmarks.grpo --output research/benchmarks/results/DATE-grpo.md \\
        --config configs/hunyuan15_1gpu_lora.yaml --pretrained_model_root /tmp/random_model \\
        --timestep_fraction 0.25 --max_steps 3

Runs rollout, VAE decode, a synthetic reward, the anchor and the update with the unmodified trainer; flags are those of
post_train.py. The cost of training all steps is extrapolated from the unit costs and marked as such.
"""

import argparse
import datetime
import json
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.config.parse import parse
from sage_grpo.models.backbone import Backbone
from sage_grpo.parallel.ranks import join_ranks
from sage_grpo.rewards.registry import REWARDS
from sage_grpo.train import trainer as training
from sage_grpo.train.build import build_trainer
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.windows import num_trained

PHASES = ("rollout", "decode", "reward", "anchor", "update")
IN_MODEL = ("rollout", "anchor", "update")


class Contrast:
    """A reward with no cost: the contrast of a clip's pixels."""

    names = ("VQ", "MQ", "TA")

    def check(self, prompts: Sequence[str]) -> None:
        """Any prompt is accepted."""

    def score(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float
    ) -> dict[str, Tensor]:
        values = torch.stack([clip.float().std() for clip in clips])
        return {"VQ": values, "MQ": values, "TA": values}


class Meter:
    """Device time of the transformer by phase: forward and backward passes."""

    def __init__(self, kind: type[Backbone]) -> None:
        self.kind = kind
        self.phase = "other"
        self.marks: list[tuple[str, Any, Any]] = []  # phase, begin, end

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Mark every forward and backward, without device syncs."""
        forward, backward = self.kind.velocity, Tensor.backward
        self.kind.velocity = self._marked(forward)
        Tensor.backward = self._marked(backward)
        try:
            yield
        finally:
            self.kind.velocity = forward
            Tensor.backward = backward

    def _marked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            begin = _now()
            result = call(*args, **kwargs)
            self.marks.append((self.phase, begin, _now()))
            return result

        return marked

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for phase, begin, end in self.marks:
            if phase in seconds:
                seconds[phase] += _between(begin, end)
        self.marks = []
        return seconds


def _now() -> Any:
    """A device timestamp, without a sync."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    """Seconds between two timestamps."""
    if not torch.cuda.is_available():
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def watched_phases(meter: Meter) -> None:
    """Tell the meter which phase the trainer is in."""
    plain = training.Stopwatch.phase

    @contextmanager
    def phase(self: Any, name: str) -> Iterator[None]:
        meter.phase = name
        with plain(self, name):
            yield
        meter.phase = "other"

    training.Stopwatch.phase = phase


def measure(trainer: Trainer) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """The records of all iterations, and the transformer's seconds in each."""
    meter = Meter(type(trainer.backbone))
    inside: list[dict[str, float]] = []
    finish_iteration = trainer.finish_iteration

    def finish() -> None:
        inside.append(meter.take())
        finish_iteration()

    watched_phases(meter)
    trainer.finish_iteration = finish
    trainer.saves.begin = lambda must=True: None
    with meter.watch():
        trainer.train()
    lines = map(json.loads, (trainer.run.path / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"], inside


def trainer_overhead(seconds: Mapping[str, float], inside: Mapping[str, float]) -> float:
    """What the trainer adds to the transformer's time in rollout, anchor and update, relative to it.

    seconds: of the phases; inside: of the transformer in each.
    """
    spent = sum(seconds[phase] for phase in IN_MODEL)
    needed = sum(inside[phase] for phase in IN_MODEL)
    return spent / needed - 1


def page(trainer: Trainer, records: list[dict[str, Any]], inside: list[dict[str, float]]) -> str:
    """The results as Markdown."""
    c = trainer.config
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    lines = [
        f"# A GRPO iteration, {where}, {datetime.date.today()}", "",
        f"    {shlex.join(['python', *sys.orig_argv[1:]])}", "",
        f"torch {torch.__version__}, Python {platform.python_version()}; {c.num_frames} x {c.height} x {c.width}, "
        f"{c.num_sampling_steps} steps, guidance {c.guidance_scale:g}, {c.batch_size} clips of "
        f"{c.batch_size // c.num_generations} prompt(s), {c.sde_type}, {'LoRA' if c.use_lora else 'all weights'}, "
        f"compiled: {c.compile}, attention kept: {c.keep_attention}, timestep_fraction {c.timestep_fraction:g}.", "",
        "| iteration | " + " | ".join(f"{phase}, s" for phase in PHASES) + " | peak GB | largest ratio deviation |",
        "|---" * (len(PHASES) + 3) + "|",
    ]  # fmt: skip
    for record in records:
        cells = [f"{record[f'time/{phase}']:.3g}" for phase in PHASES]
        cells += [f"{record['memory/peak_gb']:.1f}", f"{record['policy/ratio_max_deviation']:.3g}"]
        lines.append(f"| {record['step']} | " + " | ".join(cells) + " |")

    last = records[-1]
    seconds = {phase: last[f"time/{phase}"] for phase in PHASES}
    spent = sum(seconds[phase] for phase in IN_MODEL)
    needed = sum(inside[-1][phase] for phase in IN_MODEL)
    overhead = trainer_overhead(seconds, inside[-1])
    steps = c.num_sampling_steps
    trained = num_trained(trainer.windows.size, c.timestep_fraction)
    whole = sum(seconds.values()) + (steps / trained - 1) * (seconds["anchor"] + seconds["update"])
    lines += [
        "",
        f"- Of the last iteration's rollout, anchor and update, the transformer takes {needed:.1f} s of {spent:.1f} s: "
        f"the trainer adds {overhead:.2%}.",
        f"- KL to the anchor in the last iteration: {last['kl/anchor']:.3g} (the anchor is not the policy any more).",
        f"- Computed, not run: an iteration that trains all {steps} steps takes {whole:.0f} s, "
        f"{3600 * c.batch_size / whole:.0f} clips per GPU-hour.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="page to write")
    parser.add_argument("--memory", type=float, default=80.0, help="GiB that torch may allocate")
    options, rest = parser.parse_known_args(arguments)
    REWARDS["contrast"] = lambda setup: Contrast()
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory * 2**30 / total))
    with tempfile.TemporaryDirectory() as scratch:
        fixed = "--reward_model contrast --report_to none --log_interval 1 --validation_videos 0"
        config = parse([*rest, *fixed.split(), "--output_dir", f"{scratch}/run"])
        with join_ranks(600, sharded=config.enable_fsdp) as ranks:
            trainer = build_trainer(config, ranks)
            trainer.validation = None
            records, inside = measure(trainer)
            text = page(trainer, records, inside)
    options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
