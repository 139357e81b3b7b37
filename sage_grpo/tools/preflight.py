"""Compares all exploration SDEs on the user's model and prompts, from the same noise, before training."""

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from sage_grpo.algo.sde import SDES, Schedule, build_schedule, flow_sigmas
from sage_grpo.config import Config
from sage_grpo.runs.media import contact_sheet, thumbnails
from sage_grpo.tools.doctor_checks import Finding, judged
from sage_grpo.tools.paired import aligned
from sage_grpo.train.rollout import MicroBatch, plan_micro_batches, prompt_positions
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.validation import gold_columns

SHEET_CLIPS, SHEET_FRAMES = 3, 4  # in one row of the contact sheet
EXPLANATION = """
* is the configured sampler. noise: the sum of std^2 over the steps; +-: standard errors over prompts; vs ode: from the
same initial noise, so the change is the work of the exploration; spread: standard deviation of the reward inside a
group, which advantages are made of. Good exploration widens it and hardly lowers the reward. Then scores and gold.
"""


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
        for name, values in (("reward", reward), ("vs ode", reward - ode.columns["reward"].nanmean(1))):
            known = values[values.isfinite()]
            error = known.std().item() / math.sqrt(len(known)) if len(known) > 1 else math.nan
            row |= {name: known.mean().item(), f"{name} +-": error}
        row["spread"] = (self.columns["reward"] - reward[:, None]).square().nanmean(1).sqrt().nanmean().item()
        return row | {name: values.nanmean().item() for name, values in means.items()}


def check_samplers(trainer: Trainer, options: argparse.Namespace) -> Iterator[Finding]:
    """A table and a contact sheet of all samplers; whether the configured one gives a training signal."""
    c, sheet = trainer.config, options.output / "samplers.png"
    positions = prompt_positions(trainer.step, options.prompts, len(trainer.prompts), c.seed)
    micro = math.gcd(options.clips, len(trainer.micro_batches()[0]))  # at most as many at once as in training
    micro_batches = plan_micro_batches(positions, options.clips, options.clips * len(positions), 0, micro)
    arms, left_out = {}, []
    for name in sorted(SDES, key=lambda name: name != "ode"):
        try:
            schedule = build_schedule(name, flow_sigmas(c.num_sampling_steps, c.timestep_shift), c.eta)
        except ValueError as error:  # cps rejects an eta above 1
            left_out.append(f"{name} is left out: {error}")
        else:
            arms[name] = sample(trainer, schedule, tqdm(micro_batches, name, unit="batch", leave=False), options.clips)
    transformer = trainer.backbone.transformer
    if lossy := transformer.in_8_bits:
        transformer.in_8_bits = None
        shown = tqdm(micro_batches, "exact", unit="batch", leave=False)
        arms["exact"] = sample(trainer, trainer.sampler, shown, options.clips)
        transformer.in_8_bits = lossy
    rows = {name: arm.numbers(arms["ode"]) for name, arm in arms.items()}
    write_sheet(sheet, arms, rows, [trainer.prompts[position].text for position in positions], c)
    arm, row = arms[c.sde_type], rows[c.sde_type]
    failing = row["failed"] > c.max_reward_failures * len(arm.clips)
    text = f"with {c.sde_type} the reward varies by {row['spread']:.3g} inside a group; {sheet} shows the first clips"
    remedy = "equal rewards teach nothing: raise eta, or choose another reward or other prompts"
    if failing:
        remedy = f"{row['failed']} rewards failed, see max_reward_failures: {[*arm.errors, 'clips are not finite'][0]}"
    titles = ["  sampler", *row]
    cells = [[f"{' *'[name == c.sde_type]} {name}", *(f"{x:.3g}" for x in row.values())] for name, row in rows.items()]
    shown = "\n".join(["", aligned([titles, *cells]), *left_out, EXPLANATION])
    yield judged("samplers", row["spread"] > 0 and not failing, text, remedy, shown, rows=rows, left_out=left_out)
    if lossy:
        yield compare_exact(arm, arms["exact"])


def compare_exact(arm: Arm, exact: Arm) -> Finding:
    """What lossy steps outside the window do to the same clips and their rewards."""
    row = arm.numbers(exact)
    change, error, spread = row["vs ode"], row["vs ode +-"], row["spread"]
    both = [(a, b) for a, b in zip(arm.clips, exact.clips, strict=True) if a is not None and b is not None]
    pixels = math.sqrt(sum((a.float() - b).square().mean().item() for a, b in both) / max(1, len(both)))
    text = f"8 bits outside the window change pixels by {pixels:.2g} of 255 (RMS) and the reward by {change:.2g} +- "
    text += f"{error:.2g}; inside a group it varies by {spread:.2g}"
    good = abs(change) < max(2 * error, 0.1 * spread)
    return judged("lossy steps", good, text, "set outside_window exact", pixels=pixels, change=change, error=error)


def sample(trainer: Trainer, schedule: Schedule, micro_batches: Iterable[MicroBatch], group: int) -> Arm:
    """Clips from a sampler within the trainer's window for this iteration, decoded and scored."""
    c, clips, texts = trainer.config, [], []
    schedule = schedule.window(trainer.windows.steps).to(trainer.ranks.device)
    for micro_batch in micro_batches:  # one at a time: only the clips are kept
        clips += trainer.decode(trainer.roll_out([micro_batch], schedule))
        texts += [trainer.prompts[position].text for position, _ in micro_batch]
    scores = trainer.reward.score(clips, texts, c.fps)
    columns = {"reward": scores.total} | scores.named | gold_columns(trainer.gold, clips, texts)
    columns = {name: values.view(-1, group) for name, values in columns.items()}
    return Arm(schedule.std.double().square().sum().item(), clips, columns, scores.errors)


def write_sheet(path: Path, arms: Mapping[str, Arm], rows: Mapping, prompts: Sequence[str], config: Config) -> None:
    """Write one row of frames per sampler; a column shares prompt and noise across rows. Failed clips are black."""
    black = torch.zeros(config.num_frames, config.height, config.width, 3, dtype=torch.uint8)
    strips, labels = [], [" | ".join(prompts[:SHEET_CLIPS])]
    for name, arm in arms.items():
        firsts = arm.clips[:: len(arm.clips) // len(prompts)][:SHEET_CLIPS]
        strips.append(np.concatenate([thumbnails(black if clip is None else clip, SHEET_FRAMES) for clip in firsts]))
        numbers = ", ".join(f"{key} {rows[name][key]:.3f}" for key in ("noise", "reward", "spread"))
        labels.append(f"{name}{' (configured)' if name == config.sde_type else ''}: {numbers}")
    heading = np.full_like(strips[0][:, :1], 255)  # a white line under the prompts
    contact_sheet(path, [heading, *strips], labels)
