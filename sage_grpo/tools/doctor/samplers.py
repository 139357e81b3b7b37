"""Every exploration SDE on the model and the prompts of a run: does the configured one teach anything?"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from sage_grpo.algo.sde import SDES, Schedule, build_schedule, flow_sigmas
from sage_grpo.config.fields import Config
from sage_grpo.plugins import resolved
from sage_grpo.runs.media import contact_sheet, thumbnails
from sage_grpo.tools.doctor.checks import Finding, judged
from sage_grpo.tools.templating import render
from sage_grpo.train.batches import MicroBatch, draw_prompts, plan_micro_batches
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.validation import gold_columns

SHEET_CLIPS, SHEET_FRAMES = 3, 4  # in one row of the contact sheet


@dataclass(frozen=True)
class Arm:
    """Results of one sampler, from the same noise as the others. P prompts with G clips each."""

    noise: float  # injected energy
    clips: list[Tensor | None]  # P * G, grouped by prompt
    columns: dict[str, Tensor]  # (P, G): reward, scores, gold metrics; NaN on failure
    errors: list[str]  # from the reward

    def numbers(self, ode: "Arm") -> dict[str, float]:
        """One row of the table. Clips of one prompt are correlated, so standard errors count prompts."""
        means = {name: values.nanmean(1) for name, values in self.columns.items()}
        reward = means.pop("reward")
        row = {"noise": self.noise, "failed": int((~self.columns["reward"].isfinite()).sum())}
        for name, values in (
            ("reward", reward),
            ("vs ode", reward - ode.columns["reward"].nanmean(1)),
        ):
            known = values[values.isfinite()]
            error = known.std().item() / math.sqrt(len(known)) if len(known) > 1 else math.nan
            row |= {name: known.mean().item(), f"{name} +-": error}
        row["spread"] = (
            (self.columns["reward"] - reward[:, None]).square().nanmean(1).sqrt().nanmean().item()
        )
        return row | {name: values.nanmean().item() for name, values in means.items()}


def check_samplers(trainer: Trainer, options: argparse.Namespace) -> Iterator[Finding]:
    """A table and a contact sheet of all samplers; whether the configured one gives a training signal."""
    c, sheet = trainer.config, options.output / "samplers.png"
    positions = draw_prompts(trainer.step, options.prompts, len(trainer.requests), c.seed)
    micro = math.gcd(
        options.clips, len(trainer.micro_batches()[0])
    )  # at most as many at once as in training
    micro_batches = plan_micro_batches(
        positions, options.clips, options.clips * len(positions), 0, micro
    )
    sigmas, arms, schedules, left_out = (
        flow_sigmas(c.num_sampling_steps, c.timestep_shift),
        {},
        {},
        [],
    )
    own = (
        c.sde_type if trainer.algorithm.explores else c.algorithm
    )  # the latter samples without an SDE
    for name in dict.fromkeys(["ode", *SDES, own]):
        try:
            schedules[name] = (
                None if name == c.algorithm else build_schedule(resolved(name), sigmas, c.eta)
            )
        except ValueError as error:  # cps rejects an eta above 1
            left_out.append(f"{name} is left out: {error}")
        else:
            arms[name] = sample(trainer, name, schedules[name], micro_batches, options.clips)
    transformer = trainer.backbone.transformer
    if lossy := transformer.in_8_bits:
        transformer.in_8_bits = None
        arms["exact"] = sample(trainer, "exact", schedules[own], micro_batches, options.clips)
        transformer.in_8_bits = lossy
    rows = {name: arm.numbers(arms["ode"]) for name, arm in arms.items()}
    write_sheet(
        sheet, arms, rows, own, [trainer.requests[position].text for position in positions], c
    )
    arm, row = arms[own], rows[own]
    failing = row["failed"] if row["failed"] > c.max_reward_failures * len(arm.clips) else 0
    shown = render("samplers.txt", rows=rows, configured=own, left_out=left_out)
    said = {
        "failing": failing,
        "error": [*arm.errors, "clips are not finite"][0],
        "spread": row["spread"],
    }
    said |= {"sheet": str(sheet), "rows": rows, "left_out": left_out, "own": own}
    yield judged("samplers", row["spread"] > 0 and not failing, shown, c, **said)
    if lossy:
        yield compare_exact(arm, arms["exact"])


def compare_exact(arm: Arm, exact: Arm) -> Finding:
    """What lossy steps outside the window do to the same clips and their rewards."""
    change, error, spread = map(arm.numbers(exact).get, ("vs ode", "vs ode +-", "spread"))
    both = [
        (a, b)
        for a, b in zip(arm.clips, exact.clips, strict=True)
        if a is not None and b is not None
    ]
    pixels = math.sqrt(
        sum((a.float() - b).square().mean().item() for a, b in both) / max(1, len(both))
    )
    good = abs(change) < max(2 * error, 0.1 * spread)
    return judged("lossy steps", good, pixels=pixels, change=change, error=error, spread=spread)


def sample(
    trainer: Trainer,
    name: str,
    schedule: Schedule | None,
    batches: Sequence[MicroBatch],
    group: int,
) -> Arm:
    """Clips from a sampler within the trainer's window for this iteration, or without an SDE; decoded and scored."""
    c, clips, asked = trainer.config, [], []
    schedule = schedule and schedule.window(trainer.windows.steps).to(trainer.ranks.device)
    for micro_batch in tqdm(
        batches, name, unit="batch", leave=False
    ):  # one at a time: only clips are kept
        clips += trainer.decode(trainer.roll_out([micro_batch], schedule))
        asked += [trainer.requests[position] for position, _ in micro_batch]
    scores = trainer.reward.score(clips, asked, c.fps)
    columns = {"reward": scores.total} | scores.named | gold_columns(trainer.gold, clips, asked)
    columns = {name: values.view(-1, group) for name, values in columns.items()}
    noise = schedule.std.double().square().sum().item() if schedule else 0.0
    return Arm(noise, clips, columns, scores.errors)


def write_sheet(
    path: Path, arms: Mapping[str, Arm], rows: Mapping, own: str, prompts: list[str], c: Config
) -> None:
    """Write one row of frames per sampler; a column shares prompt and noise across rows. Failed clips are black."""
    black = torch.zeros(c.num_frames, c.height, c.width, 3, dtype=torch.uint8)
    strips, labels = [], [" | ".join(prompts[:SHEET_CLIPS])]
    for name, arm in arms.items():
        firsts = arm.clips[:: len(arm.clips) // len(prompts)][:SHEET_CLIPS]
        strips.append(
            np.concatenate(
                [thumbnails(black if clip is None else clip, SHEET_FRAMES) for clip in firsts]
            )
        )
        numbers = ", ".join(f"{key} {rows[name][key]:.3f}" for key in ("noise", "reward", "spread"))
        labels.append(f"{name}{' (configured)' if name == own else ''}: {numbers}")
    heading = np.full_like(strips[0][:, :1], 255)  # a white line under the prompts
    contact_sheet(path, [heading, *strips], labels)
