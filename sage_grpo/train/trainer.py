"""GRPO post-training, one loop for every size: prompts, rollout, score, advantage, update."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sage_grpo.algo.grpo import Advantages, group_advantages, score_advantages
from sage_grpo.algo.sde import Schedule
from sage_grpo.config.fields import Config
from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Backbone, Guidance
from sage_grpo.parallel.fsdp import gathered, reduce_gradients_in_next_backward
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.base import Composite, Scores
from sage_grpo.runs.folder import RunFolder
from sage_grpo.train.guards import MAX_SKIPPED, Guards, TrainingError
from sage_grpo.train.metrics import (
    HalfGradient,
    Stopwatch,
    UpdateStats,
    peak_memory,
    reward_record,
    signals,
)
from sage_grpo.train.optimization import Anchor, Optimization
from sage_grpo.train.rollout import (
    MicroBatch,
    Trajectory,
    parse_windows,
    plan_micro_batches,
    prompt_positions,
)
from sage_grpo.train.saving import Saves
from sage_grpo.train.update import ALGORITHMS, Objective, anchor_velocities, sampler_of
from sage_grpo.train.validation import Gold, Validation, decoded, gold_columns

DIAGNOSED = (
    25  # iterations between diagnoses, the first after one; they also follow each validation
)


@dataclass(eq=False)
class Trainer:
    """The state of a run; `step` counts completed iterations. `build.py` assembles one."""

    config: Config
    ranks: Ranks
    backbone: Backbone
    optimization: Optimization
    anchor: Anchor | None
    prompts: Sequence[Request]
    guidance: Guidance
    reward: Composite
    gold: Gold | None
    validation: Validation | None
    run: RunFolder

    def __post_init__(self) -> None:
        c, self.algorithm = self.config, ALGORITHMS[self.config.algorithm]
        self.trained_guidance = self.guidance if self.algorithm.explores else Guidance()
        self.sampler = sampler_of(c).to(self.ranks.device)
        self.windows = parse_windows(c.sde_window, self.sampler.stochastic, c.seed)
        self.shape = self.backbone.latent_shape(c.num_frames, c.height, c.width)
        self.guards = Guards(self.ranks, self.run, c.collective_timeout)
        self.gathered = partial(
            gathered, self.backbone.transformer, c.gather_for_rollout
        )  # for many forwards
        self.step, self.saves, self.controller = (
            0,
            Saves(self, self.run.checkpoints),
            c.kl_controller(),
        )
        self.fingerprints: dict[str, Any] = {}
        self.resumed_from: Path | None = None
        self.trained_since_update, self.ratio_checked = False, False
        # accumulated rollouts that await their optimizer step: their metrics, and which clips were finite
        self.pending = self.no_stats()
        self.finite: list[tuple[MicroBatch, Tensor]] = []
        self.half = HalfGradient(self.optimization.parameters.values(), self.ranks, c.reduces_once)

    def train(self) -> None:
        """Run the remaining iterations; validate and save as configured and at the end; also save on a signal."""
        with (
            self.guards.watching(self.step, self.saves.begin, self.saves.settle),
            self.progress() as bar,
        ):
            self.catch_up()
            while self.step < self.config.max_steps:
                watch = Stopwatch(self.ranks.device, self.enter)
                with watch.phase("rollout"):
                    batch = self.roll_out()
                with watch.phase("decode"):
                    clips = self.decode(batch)
                with watch.phase("reward"):
                    scores = self.score(batch, clips)
                with watch.phase("gold"):
                    gold = self.measure_gold(batch, clips)
                advantages = self.advantages(scores)
                with watch.phase("anchor"):
                    self.prepare_anchor(batch)
                with watch.phase("update"):
                    record = self.update(batch, advantages)
                self.step += 1
                record |= (
                    reward_record(scores, advantages, self.config.num_generations)
                    | gold
                    | watch.record()
                )
                record |= {
                    "kl/anchor_age": self.anchor.age if self.anchor else None,
                    "memory/peak_gb": peak_memory(),
                }
                record |= signals(self, clips, scores) if self.logged(self.step) else {}
                self.log(record, bar)
                self.finish_iteration()

    @contextmanager
    def progress(self) -> Iterator[tqdm]:
        """Progress bar, and heartbeat for the guards: ticks on every model forward and every reward batch."""
        heartbeat = self.backbone.transformer.register_forward_pre_hook(
            lambda *_: self.guards.beat()
        )
        for reward in filter(None, (self.reward, self.validation and self.validation.holdout)):
            reward.on_batch = self.guards.beat
        total, hidden = self.config.max_steps, not self.ranks.first
        with heartbeat, tqdm(total=total, initial=self.step, unit="it", disable=hidden) as bar:
            yield bar

    def enter(self, phase: str) -> None:
        """Begin the next phase, at a safe point."""
        self.guards.note(phase)
        self.safe_point()

    def safe_point(self, inside: bool = False) -> None:
        """Stop if told to, and commit a checkpoint whose files are on disk; all ranks must call.

        inside: a phase, in which ranks that join prompts may run different numbers of micro-batches.
        """
        if not inside or self.config.prompts_per_forward == 1:
            self.guards.stop_if_told()
            self.saves.settle()

    def catch_up(self) -> None:
        """Run the validation due before the first iteration, or one that an interrupted run missed."""
        due = (
            self.due(self.config.validation_interval)
            if self.step
            else self.config.validate_at_step0
        )
        if due and self.ranks.any(self.ranks.first and not self.run.has("validation", self.step)):
            self.validate()

    def micro_batches(self) -> list[MicroBatch]:
        """This rank's micro-batches for this iteration, each of one prompt."""
        c = self.config
        groups = c.batch_size * self.ranks.count // c.num_generations
        positions = prompt_positions(self.step, groups, len(self.prompts), c.seed)
        return plan_micro_batches(
            positions, c.num_generations, c.batch_size, self.ranks.rank, c.micro_batch_size
        )

    def roll_out(
        self, micro_batches: Sequence[MicroBatch] | None = None, sampler: Schedule | None = None
    ) -> list[Trajectory]:
        """Sample trajectories for `micro_batches`, by default this rank's share of the iteration.

        With a `sampler` of its own they explore by its noise, whatever the algorithm.
        """
        c, batch, micro_batches = (
            self.config,
            [],
            self.micro_batches() if micro_batches is None else micro_batches,
        )
        positions = list(dict.fromkeys(prompt for one in micro_batches for prompt, _ in one))
        encoded = (
            cond.to(self.ranks.device)
            for cond in self.backbone.encode([self.prompts[p] for p in positions])
        )
        how = (
            self.backbone,
            sampler or self.sampler,
            self.windows,
            self.guidance,
            self.shape,
            c,
            self.step,
        )
        algorithm = self.algorithm if sampler is None else ALGORITHMS["grpo"]
        rollouts = algorithm.rollouts(*how, conditions=dict(zip(positions, encoded, strict=True)))
        for micro_batch in rollouts.joined(micro_batches):
            self.safe_point(inside=True)
            with self.optimization.using(self.optimization.old), self.gathered():
                batch.append(rollouts(micro_batch))
        return batch

    def decode(self, batch: Sequence[Trajectory]) -> list[Tensor | None]:
        """uint8 clips (F, H, W, 3) on the CPU; None where the trajectory or the pixels are not finite."""
        latents = torch.cat([trajectory.latents for trajectory in batch]).split(1)
        is_finite = torch.cat([trajectory.is_finite for trajectory in batch]).tolist()
        clips = self.ranks.shared(latents, lambda mine: decoded(self.backbone, mine))
        return [clip if finite else None for clip, finite in zip(clips, is_finite, strict=True)]

    def score(self, batch: Sequence[Trajectory], clips: Sequence[Tensor | None]) -> Scores:
        """Scores of the full batch and the first error from each rank; too many failures stop the run."""
        mine = self.ranks.from_leader(
            lambda: self.reward.score(clips, self.requests(batch), self.config.fps)
        )
        named = {name: self.ranks.gather(values) for name, values in mine.named.items()}
        scores = Scores(self.ranks.gather(mine.total), named, weights=mine.weights)
        if (
            not scores.total.isfinite().all()
        ):  # gathered scores, so all ranks take this branch or none does
            errors = [text for text in self.ranks.texts("".join(mine.errors[:1])) if text]
            scores.errors = errors or ["a clip could not be decoded, its numbers are not finite"]
        failed, limit = (
            (~scores.total.isfinite()).double().mean().item(),
            self.config.max_reward_failures,
        )
        if failed > limit:
            many = (
                f"{failed:.0%} of the rewards failed, more than max_reward_failures ({limit:.0%})"
            )
            raise TrainingError(
                f"iteration {self.step + 1}: {many}; the first error was: {scores.errors[0]}"
            )
        return scores

    def measure_gold(
        self, batch: Sequence[Trajectory], clips: Sequence[Tensor | None]
    ) -> dict[str, float]:
        """The oracle's metrics, for reporting only; nothing in training depends on them."""
        if not self.logged(self.step + 1):
            return {}
        columns = self.ranks.from_leader(
            lambda: gold_columns(self.gold, clips, self.requests(batch))
        )
        names = dict.fromkeys(
            name for text in self.ranks.texts(" ".join(columns)) for name in text.split()
        )
        missing = torch.full(
            (len(clips),), math.nan, dtype=torch.float64
        )  # for a rank that has no clip to measure
        found = {name: self.ranks.gather(columns.get(name, missing)) for name in names}
        return {f"gold/{name}": values.nanmean().item() for name, values in found.items()}

    def advantages(self, scores: Scores) -> Advantages:
        """Advantages over all ranks: rows are clips in plan order, group by group."""
        c, groups = self.config, torch.arange(len(scores.total)) // self.config.num_generations
        if c.advantage_per_score:
            return score_advantages(
                scores.named, scores.weights, groups, c.advantage_std, c.adv_clip_max
            )
        return group_advantages(scores.total, groups, c.advantage_std, c.adv_clip_max)

    def prepare_anchor(self, batch: Sequence[Trajectory]) -> None:
        """Store the anchor's velocities along the rollout; while it equals the policy, the rollout's are used."""
        if self.anchor is None or (self.anchor.age == 0 and not self.config.lags):
            return
        with self.anchor.in_place(), self.gathered():
            for one in batch:
                one.anchor_velocity = anchor_velocities(
                    self.backbone, self.trained_guidance, self.sampler, one
                )

    def update(self, batch: Sequence[Trajectory], advantages: Advantages) -> dict[str, Any]:
        """Train the rollout's steps in `updates_per_rollout` parts, with an optimizer step after each."""
        c = self.config
        rows = len(advantages.values) // self.ranks.count
        mine = advantages.values[self.ranks.rank * rows :][:rows].to(
            self.ranks.device, torch.float32
        )
        shares = list(
            zip(batch, mine.split([len(trajectory.x) for trajectory in batch]), strict=True)
        )
        record: dict[str, Any] = {
            "lr": self.optimization.learning_rate,
            "kl/coef": self.controller.coef,
        }
        total = self.no_stats()
        for update, part in enumerate(
            torch.arange(batch[0].order.shape[1]).tensor_split(c.updates_per_rollout)
        ):
            pairs = c.gradient_accumulation_steps * len(advantages.values) * len(part)
            goal = Objective(
                self.backbone, self.trained_guidance, self.sampler, c, self.controller.coef, pairs
            )
            stats = self.no_stats()
            micro_steps = [(column, *share) for column in part.tolist() for share in shares]
            for number, (column, trajectory, advantage) in enumerate(micro_steps, 1):
                if update == 0:  # later updates see changed weights
                    self.safe_point(inside=True)
                reduced = not c.reduces_once or number == len(micro_steps)
                reduce_gradients_in_next_backward(self.backbone.transformer, reduced)
                finite = goal.backward(trajectory, trajectory.order[:, column], advantage, stats)
                self.finite.append((trajectory.micro_batch, finite))
                begun = self.step % c.gradient_accumulation_steps * len(micro_steps)
                self.half.observe(begun + number, c.gradient_accumulation_steps * len(micro_steps))
            stats.sum_over(self.ranks)
            self.check_first_ratio(stats)
            self.pending += stats
            self.trained_since_update |= bool(advantages.trained.any())
            total += stats
            if (self.step + 1) % c.gradient_accumulation_steps == 0:
                norm = self.optimizer_step()
                record |= {"policy/grad_norm": norm, "policy/grad_rms": self.optimization.rms(norm)}
        counts = {
            "updates": self.optimization.updates,
            "policy/skipped_updates": self.optimization.skipped,
        }
        return record | total.record() | counts

    def no_stats(self) -> UpdateStats:
        return UpdateStats(self.sampler.num_steps, self.ranks.device)

    def check_first_ratio(self, stats: UpdateStats) -> None:
        """Once per run: unless the rollout's policy lags behind, the first ratio must be exactly 1, resumed or not."""
        deviation, behind = (
            stats.max_deviation.max().item(),
            self.config.lags and self.optimization.updates,
        )
        if not self.ratio_checked and not behind and deviation:
            why = "another kernel, precision or batch shape"
            text = f"rollout and training run different arithmetic ({why}), and every gradient would be wrong"
            raise TrainingError(f"the first ratio differs from 1 by {deviation:.3g}: {text}")
        self.ratio_checked = True

    def optimizer_step(self) -> float:
        """Step on the gradients of all ranks, unless they carry no signal or are not finite; returns their norm."""
        self.ranks.sum_gradients(self.optimization.parameters.values())
        grad_norm = self.optimization.clip()
        self.half.compare(grad_norm)
        if self.optimization.should_step(grad_norm, self.trained_since_update):
            self.optimization.step()
            if self.ranks.any(not self.optimization.is_finite):
                raise self.saves.diverged(
                    f"the weights are not finite after iteration {self.step + 1}"
                )
            if self.anchor:
                self.anchor.age += 1
            self.controller.update(
                self.pending.mean("kl_anchor" if self.config.trust_region.anchor else "kl_rollout")
            )
        if self.optimization.skipped_in_a_row > MAX_SKIPPED:
            where = f"iteration {self.step + 1} at {self.first_nonfinite_clip()} with seed {self.config.seed}"
            times = f"{self.optimization.skipped_in_a_row} times in a row"
            raise self.saves.diverged(f"the gradient was not finite {times}, at last in {where}")
        self.optimization.zero_grad()
        self.pending, self.finite, self.trained_since_update = self.no_stats(), [], False
        return grad_norm

    def first_nonfinite_clip(self) -> str:
        """The first clip of this optimizer step whose loss or gradient is not finite, on any rank."""
        clips = (
            one[i] for one, finite in self.finite for i in (~finite).nonzero().flatten().tolist()
        )
        mine = next(
            (f"{self.prompts[prompt].text!r}, clip {sample}" for prompt, sample in clips), ""
        )
        return next((text for text in self.ranks.texts(mine) if text), "the parameters")

    def finish_iteration(self) -> None:
        """Called between iterations: refresh the anchor; validate and save when due and at the end."""
        if self.anchor:
            self.anchor.refresh_if_due()
        if self.due(self.config.save_interval) or self.saves.is_due:
            self.saves.begin(must=self.step == self.config.max_steps)
        if self.due(self.config.validation_interval):
            self.validate()
        if self.due(self.config.validation_interval) or self.step % DIAGNOSED == 1:
            self.run.diagnose(self.step)

    def due(self, interval: int) -> bool:
        """Whether something scheduled every `interval` iterations, and at the end, is due now."""
        return bool(interval and self.step % interval == 0) or self.step == self.config.max_steps

    @property
    def settled_step(self) -> int:
        """The last iteration whose gradients are in the weights; rollouts still accumulating are redone on resume."""
        return self.step - self.step % self.config.gradient_accumulation_steps

    def validate(self) -> None:
        if self.validation is None:
            return
        watch, folder = (
            Stopwatch(self.ranks.device, self.enter),
            self.run.validation_folder(self.step),
        )
        with watch.phase("validation"), self.optimization.using(self.optimization.average):
            record = self.validation.run(
                folder, lambda: self.safe_point(inside=True), self.gathered
            )
        hacked = self.ranks.from_leader(
            lambda: "".join(self.ranks.texts(self.run.divergence(self.step)))
        )
        record |= {"holdout/diverged": int(bool(hacked))} if self.config.holdout_reward else {}
        self.run.log_validation(self.step, record | watch.record())
        if self.config.stop_on_hacking and hacked:
            raise TrainingError(hacked)

    def log(self, record: dict[str, Any], bar: tqdm) -> None:
        self.guards.step = self.step
        self.guards.report("running")
        if self.logged(self.step):
            self.run.log("train", self.step, record)
        shown = {
            "reward": record["reward/total"],
            "kl": record["kl/anchor"],
            "match": record.get("gold/match"),
        }
        shown["clips/h"] = 3600 * self.config.batch_size * self.ranks.count / record["time/total"]
        bar.set_postfix(
            {k: f"{float(f'{v:.3g}'):g}" for k, v in shown.items() if v is not None}, refresh=False
        )
        bar.update()

    def logged(self, step: int) -> bool:
        """Whether iteration `step` writes its metrics."""
        return step % self.config.log_interval == 0 or step == self.config.max_steps

    def requests(self, batch: Sequence[Trajectory]) -> list[Request]:
        """The request of each of this rank's clips."""
        return [self.prompts[prompt] for t in batch for prompt, _ in t.micro_batch]
