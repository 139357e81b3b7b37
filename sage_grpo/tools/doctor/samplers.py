"""Every exploration SDE on the model and the prompts of a run: does the configured one give a training signal?"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from sage_grpo.algo.sde import SDES, Schedule, flow_sigmas
from sage_grpo.models.sample import schedule_of
from sage_grpo.runs.media import contact_sheet, thumbnails
from sage_grpo.tools.doctor.check_result import CheckResult, note, ok, wrong
from sage_grpo.tools.paired import aligned
from sage_grpo.train.batches import MicroBatch, draw_prompts, plan_micro_batches
from sage_grpo.train.clips import gold_metrics
from sage_grpo.train.trainer import Trainer

ODE = "ode"
EXACT = "exact"  # the configured sampler without lossy steps
SHEET_CLIPS = 3  # in one row of the contact sheet
SHEET_FRAMES = 4  # of each of them
LEGEND = """\
* is the configured sampler. noise: the sum of std^2 over the steps; +-: standard errors over prompts; vs ode: from the
same initial noise, so exploration alone makes the difference; spread: standard deviation of the reward within a group,
which advantages are made of. Good exploration widens the spread and hardly lowers the reward. Then scores and gold."""


@dataclass(frozen=True)
class Results:
    """Clips of one sampler, made from the same initial noise as those of the others. P prompts with G clips each."""

    noise: float  # injected energy
    clips: list[Tensor | None]  # P * G, grouped by prompt; None if not finite
    columns: dict[str, Tensor]  # (P, G): reward, scores, gold metrics; NaN on failure
    errors: list[str]  # from the reward

    @property
    def num_failed(self) -> int:
        return int((~self.columns["reward"].isfinite()).sum())

    @property
    def spread(self) -> float:
        """Standard deviation of the reward within a group, averaged over prompts."""
        reward = self.columns["reward"]
        deviation = reward - reward.nanmean(1, keepdim=True)
        return deviation.square().nanmean(1).sqrt().nanmean().item()

    def row(self, reference: "Results") -> dict[str, float]:
        """One row of the table, compared with `reference`."""
        prompt_means = {name: values.nanmean(1) for name, values in self.columns.items()}
        reward = prompt_means.pop("reward")
        mean, error = mean_and_error(reward)
        change, change_error = mean_and_error(reward - reference.columns["reward"].nanmean(1))
        row = {
            "noise": self.noise,
            "failed": self.num_failed,
            "reward": mean,
            "reward +-": error,
            "vs ode": change,
            "vs ode +-": change_error,
            "spread": self.spread,
        }
        for name, values in prompt_means.items():
            row[name] = values.nanmean().item()
        return row


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Mean of the finite values (P,), one per prompt, and its standard error.

    Clips of one prompt are correlated, so the error counts prompts.
    """
    finite = values[values.isfinite()]
    error = finite.std().item() / math.sqrt(len(finite)) if len(finite) > 1 else math.nan
    return finite.mean().item(), error


class Comparison:
    """Samples `num_prompts` prompts, with `num_clips` clips each, by one sampler after another."""

    def __init__(self, trainer: Trainer, num_prompts: int, num_clips: int) -> None:
        c = trainer.config
        self.trainer = trainer
        self.num_clips = num_clips
        self.prompt_indices = draw_prompts(trainer.step, num_prompts, len(trainer.requests), c.seed)
        self.micro_batches: list[MicroBatch] = plan_micro_batches(
            self.prompt_indices,
            group_size=num_clips,
            batch_size=num_clips * len(self.prompt_indices),
            dp_rank=0,
            # at most as many clips at once as in training
            micro_batch_size=math.gcd(num_clips, len(trainer.micro_batches()[0])),
        )
        # Without an SDE, the algorithm is the sampler.
        self.configured = c.sde_type if trainer.algorithm.explores else c.algorithm
        self.left_out: list[str] = []  # samplers that cannot run, with the reason

    @property
    def prompts(self) -> list[str]:
        return [self.trainer.requests[index].text for index in self.prompt_indices]

    def run(self) -> dict[str, Results]:
        """Results by sampler, the ODE first."""
        results = {}
        for name in dict.fromkeys([ODE, *SDES, self.configured]):
            try:
                schedule = self.schedule(name)
            except ValueError as error:  # cps rejects an eta above 1
                self.left_out.append(f"{name} is left out: {error}")
            else:
                results[name] = self.sample(name, schedule)

        transformer = self.trainer.backbone.transformer
        if lossy := transformer.in_8_bits:
            transformer.in_8_bits = None
            results[EXACT] = self.sample(EXACT, self.schedule(self.configured))
            transformer.in_8_bits = lossy
        return results

    def schedule(self, name: str) -> Schedule | None:
        """The schedule of a sampler, with noise in this iteration's window; None if the algorithm has no SDE."""
        c = self.trainer.config
        if name == c.algorithm:
            return None
        sigmas = flow_sigmas(c.num_sampling_steps, c.timestep_shift)
        schedule = schedule_of(name, sigmas, c.eta)
        return schedule.window(self.trainer.windows.steps).to(self.trainer.ranks.device)

    def sample(self, name: str, schedule: Schedule | None) -> Results:
        """Sample, decode and score."""
        trainer = self.trainer
        clips = []
        requests = []
        # One micro-batch at a time: only clips are kept.
        for micro_batch in tqdm(self.micro_batches, name, unit="batch", leave=False):
            batch = trainer.roll_out([micro_batch], schedule)
            clips += trainer.decode(batch)
            requests += trainer.requests_of(batch)
        scores = trainer.reward.score(clips, requests, trainer.config.fps)
        columns = {"reward": scores.total, **scores.named}
        columns |= gold_metrics(trainer.gold, clips, requests)
        return Results(
            noise=schedule.std.double().square().sum().item() if schedule else 0.0,
            clips=clips,
            columns={name: values.view(-1, self.num_clips) for name, values in columns.items()},
            errors=scores.errors,
        )


def check_samplers(
    trainer: Trainer, num_prompts: int, num_clips: int, output: Path
) -> Iterator[CheckResult]:
    """A table and a contact sheet of all samplers, written to `output`.

    WRONG if the configured sampler's rewards fail too often, or are equal within every group.
    """
    comparison = Comparison(trainer, num_prompts, num_clips)
    configured = comparison.configured
    results = comparison.run()
    rows = {name: result.row(results[ODE]) for name, result in results.items()}
    sheet = output / "samplers.png"
    write_sheet(sheet, comparison, results)

    result = results[configured]
    most_failures = trainer.config.max_reward_failures * len(result.clips)
    failing = result.num_failed if result.num_failed > most_failures else 0
    error = result.errors[0] if result.errors else "clips are not finite"
    text = (
        f"with {configured} the reward varies by {result.spread:.3g} within a group; "
        f"{sheet} shows the first clips"
    )
    table = sampler_table(rows, configured, comparison.left_out)
    numbers = {
        "configured": configured,
        "spread": result.spread,
        "failing": failing,
        "error": error,
        "sheet": str(sheet),
        "rows": rows,
        "left_out": comparison.left_out,
    }
    if failing:
        remedy = f"{failing} rewards failed, see max_reward_failures: {error}"
        yield wrong("samplers", text, remedy, table=table, numbers=numbers)
    elif not result.spread > 0:  # nor may it be NaN
        remedy = "equal rewards teach nothing: raise eta, or choose another reward or other prompts"
        yield wrong("samplers", text, remedy, table=table, numbers=numbers)
    else:
        yield ok("samplers", text, table=table, numbers=numbers)
        yield from cost_result(configured, rows[configured])

    if EXACT in results:
        yield lossy_steps_result(result, results[EXACT])


def cost_result(configured: str, row: Mapping[str, float]) -> Iterator[CheckResult]:
    """A note if exploration costs more reward than it spreads, beyond two standard errors."""
    cost = -row["vs ode"]
    error = row["vs ode +-"]
    if cost - 2 * error > row["spread"]:
        yield note(
            "samplers",
            f"{configured} lowers the reward by {cost:.3g} +- {error:.2g}, more than it varies within a group: "
            "its clips are far from what the model draws; lower eta, use more steps, or set sde_type precise",
            numbers={"cost": cost, "error": error, "spread": row["spread"]},
        )


def sampler_table(
    rows: Mapping[str, Mapping[str, float]], configured: str, left_out: Sequence[str]
) -> str:
    """One line per sampler, and what the columns mean."""
    table = [["  sampler", *rows[configured]]]
    for name, row in rows.items():
        star = "*" if name == configured else " "
        table.append([f"{star} {name}", *(f"{value:.3g}" for value in row.values())])
    return "\n".join(["", aligned(table), *left_out, "", LEGEND, ""])


def lossy_steps_result(lossy: Results, exact: Results) -> CheckResult:
    """WRONG if 8 bits outside the window change the reward by a tenth of its spread, beyond two standard errors."""
    row = lossy.row(exact)
    change = row["vs ode"]
    error = row["vs ode +-"]
    pixels = pixel_rms(lossy.clips, exact.clips)
    text = (
        f"8 bits outside the window change pixels by {pixels:.2g} of 255 (RMS) and the reward by "
        f"{change:.2g} +- {error:.2g}; within a group it varies by {lossy.spread:.2g}"
    )
    numbers = {"pixels": pixels, "change": change, "error": error, "spread": lossy.spread}
    if abs(change) < max(2 * error, 0.1 * lossy.spread):
        return ok("lossy steps", text, numbers=numbers)
    return wrong("lossy steps", text, "set outside_window exact", numbers=numbers)


def pixel_rms(clips: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> float:
    """RMS difference between pairs of clips, over those that are finite in both."""
    squares = [
        (clip.float() - other).square().mean().item()
        for clip, other in zip(clips, others, strict=True)
        if clip is not None and other is not None
    ]
    return math.sqrt(sum(squares) / max(1, len(squares)))


def write_sheet(path: Path, comparison: Comparison, results: Mapping[str, Results]) -> None:
    """Write one row of frames per sampler; a column shares prompt and noise across rows. Failed clips are black."""
    c = comparison.trainer.config
    black = torch.zeros(c.num_frames, c.height, c.width, 3, dtype=torch.uint8)
    strips = []
    labels = []
    for name, result in results.items():
        first_of_prompts = result.clips[:: comparison.num_clips][:SHEET_CLIPS]
        shown = [black if clip is None else clip for clip in first_of_prompts]
        strips.append(np.concatenate([thumbnails(clip, SHEET_FRAMES) for clip in shown]))

        configured = " (configured)" if name == comparison.configured else ""
        row = result.row(results[ODE])
        numbers = ", ".join(f"{key} {row[key]:.3f}" for key in ("noise", "reward", "spread"))
        labels.append(f"{name}{configured}: {numbers}")

    white_line = np.full_like(strips[0][:, :1], 255)  # under the prompts
    prompts = " | ".join(comparison.prompts[:SHEET_CLIPS])
    contact_sheet(path, [white_line, *strips], [prompts, *labels])
