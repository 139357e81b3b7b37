"""Every exploration SDE on the user's own model and prompts, from the same noise, before one is trained with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from sage_grpo.algo.sde import SDES, Schedule, build_schedule, flow_sigmas
from sage_grpo.media import contact_sheet, thumbnails
from sage_grpo.train.rollout import Piece, exploring_steps, plan, prompt_positions
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.validation import gold_columns

SHEET_CLIPS, SHEET_FRAMES = 3, 4  # in one row of the contact sheet
EXPLANATION = """\
  noise    energy that is injected: the sum over the steps of std^2
  reward   mean over decoded clips +- its standard error over prompts; beside it each score by itself
  vs ode   same prompts, same initial noise: the change is the work of the exploration noise
  spread   standard deviation of the reward inside a group, which is what advantages are made of; that of the ODE
           comes from the initial noise alone. Good exploration widens the spread and hardly lowers the reward."""
GOLD_EXPLANATION = "read by the exact oracle of the model's world, which no reward sees"


@dataclass
class Comparison:
    prompts: list[str]
    group: int  # clips of each prompt
    rows: list[dict[str, Any]] = field(default_factory=list)  # numbers of each sampler, the ODE first
    clips: dict[str, list[Tensor | None]] = field(default_factory=dict)  # by sampler, prompt after prompt

    @property
    def texts(self) -> list[str]:
        """The prompt of each clip."""
        return [prompt for prompt in self.prompts for _ in range(self.group)]


def compare_samplers(trainer: Trainer, prompts: int, group: int) -> Comparison:
    """Sample, decode, score: `group` clips of each prompt by every sampler at the configured eta and steps."""
    positions = prompt_positions(trainer.step, prompts, len(trainer.prompts), trainer.config.seed)
    micro = math.gcd(group, len(trainer.pieces()[0].samples))  # never more clips at a time than training has
    pieces = plan(positions, group, prompts * group, 0, micro)
    found = Comparison([trainer.prompts[position].text for position in positions], group)
    names = sorted(SDES, key=lambda name: name != "ode")
    with tqdm(total=len(names) * len(pieces), desc="comparing samplers", unit="batch", leave=False) as bar:
        for name in names:
            bar.set_postfix_str(name)
            try:
                schedule = sampler(trainer, name)
            except ValueError as error:  # cps refuses an eta above 1
                found.rows.append({"sde": name, "left_out": str(error)})
                bar.update(len(pieces))
                continue
            found.clips[name] = sample(trainer, schedule, pieces, bar)
            found.rows.append({"sde": name} | measure(trainer, schedule, found.clips[name], found))
    return found


def sampler(trainer: Trainer, name: str) -> Schedule:
    """The trainer's schedule of this iteration with another type of SDE."""
    c = trainer.config
    schedule = build_schedule(name, flow_sigmas(c.num_sampling_steps, c.timestep_shift), c.eta)
    inside = exploring_steps(c.sde_window, schedule.num_steps, trainer.step, c.seed)
    return schedule.window(inside).to(trainer.ranks.device)


def sample(trainer: Trainer, schedule: Schedule, pieces: Sequence[Piece], bar: tqdm) -> list[Tensor | None]:
    clips: list[Tensor | None] = []
    for piece in pieces:  # one by one: only the clips are kept
        clips += trainer.decode(trainer.roll_out(schedule, [piece]))
        bar.update()
    return clips


def measure(
    trainer: Trainer, schedule: Schedule, clips: Sequence[Tensor | None], comparison: Comparison
) -> dict[str, Any]:
    """Rewards, gold metrics and exploration of one sampler's clips."""
    scores = trainer.reward.score(clips, comparison.texts, trainer.config.fps)
    gold = gold_columns(trainer.gold, clips, comparison.texts)
    by_prompt = {name: prompt_means(values, comparison.group) for name, values in scores.named.items()}
    by_prompt["total"] = total = prompt_means(scores.total, comparison.group)
    ode = comparison.rows[0]["by_prompt"] if comparison.rows else total
    groups = [row[row.isfinite()] for row in scores.total.split(comparison.group)]
    return {
        "clips": len(clips),
        "failed": int((~scores.total.isfinite()).sum()),
        "first_error": next(iter(scores.errors), None),
        "noise_energy": schedule.std.double().square().sum().item(),
        "reward": {name: mean_and_error(values) for name, values in by_prompt.items()},
        "vs_ode": mean_and_error(total - ode),
        "spread": float(np.mean([row.std(correction=0).item() for row in groups if len(row)] or [math.nan])),
        "gold": {name: mean_and_error(prompt_means(values, comparison.group)) for name, values in gold.items()},
        "by_prompt": total.tolist(),
    }


def prompt_means(values: Tensor, group: int) -> np.ndarray:
    """Mean over each prompt's clips that have a value."""
    return values.view(-1, group).nanmean(1).numpy()


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Clips of one prompt resemble each other, so the standard error counts prompts, not clips."""
    values = values[np.isfinite(values)]
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()) if len(values) else math.nan, float(error)


def table(comparison: Comparison, chosen: str) -> str:
    """The rows for people; the configured sampler has a mark."""
    first = comparison.rows[0]
    scores, gold = [name for name in first["reward"] if name != "total"], list(first["gold"])
    lines = [["  sampler", "noise", "reward", "vs ode", *scores, "spread", *gold]]
    for row in comparison.rows:
        name = f"{'*' if row['sde'] == chosen else ' '} {row['sde']}"
        if "left_out" in row:
            lines.append([name, "left out", row["left_out"]])
            continue
        lines.append(
            [name, f"{row['noise_energy']:.3g}", plus_minus(row["reward"]["total"])]
            + [plus_minus(row["vs_ode"], "+") if row["sde"] != "ode" else ""]
            + [f"{row['reward'][score][0]:.2f}" for score in scores]
            + [f"{row['spread']:.3f}", *(f"{row['gold'][name][0]:.3f}" for name in gold)]
        )
    whole = [line for line in lines if len(line) > 3]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def explanation(comparison: Comparison) -> str:
    """How to read the table."""
    gold = comparison.rows[0]["gold"]
    return EXPLANATION + (f"\n  {', '.join(gold)}: {GOLD_EXPLANATION}" if gold else "")


def plus_minus(value: tuple[float, float], sign: str = "") -> str:
    return f"{value[0]:{sign}.3f} +- {value[1]:.3f}"


def write_sheet(path: Path, comparison: Comparison, trainer: Trainer) -> None:
    """One row of frames per sampler; a column is the same prompt and noise in all rows. Lost clips are black."""
    c = trainer.config
    black = torch.zeros(c.num_frames, c.height, c.width, 3, dtype=torch.uint8)
    shown = range(0, len(comparison.texts), comparison.group)[:SHEET_CLIPS]
    strips, labels = [], []
    for row in comparison.rows:
        clips = comparison.clips.get(row["sde"])
        if clips is not None:
            frames = [thumbnails(black if clips[i] is None else clips[i], SHEET_FRAMES) for i in shown]
            strips.append(np.concatenate(frames))
            mark = " (configured)" if row["sde"] == c.sde_type else ""
            numbers = f"noise {row['noise_energy']:.3g}, reward {plus_minus(row['reward']['total'])}"
            labels.append(f"{row['sde']}: {numbers}, spread {row['spread']:.3f}{mark}")
    heading = np.full_like(strips[0][:, :1], 255)  # a white line under the prompts
    contact_sheet(path, [heading, *strips], [" | ".join(comparison.prompts[:SHEET_CLIPS]), *labels])
