"""Post-training, one loop for every size and every algorithm: prompts, rollout, score, advantage, update."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sage_grpo.algo.grpo import Advantages, centered, group_advantages, score_advantages
from sage_grpo.algo.sde import Schedule
from sage_grpo.algo.selection import extreme_rows
from sage_grpo.config.fields import Config
from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Backbone, Guidance
from sage_grpo.parallel.fsdp import keep_unsharded, reduce_gradients_in_next_backward
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.base import Composite, Scores
from sage_grpo.runs.folder import RunFolder
from sage_grpo.runs.gallery import extremes, record_of
from sage_grpo.train.algorithms.base import Algorithm
from sage_grpo.train.algorithms.grpo import ExploringSampler
from sage_grpo.train.batches import (
    ClipId,
    GroupId,
    MicroBatch,
    draw_prompts,
    group_of,
    join_micro_batches,
    plan_micro_batches,
    split_clips,
)
from sage_grpo.train.clips import Gold, decoded, gold_metrics
from sage_grpo.train.diagnosis_metrics import HalfGradient, diagnosis_metrics
from sage_grpo.train.export import Export
from sage_grpo.train.guards import MAX_SKIPPED, Guards, TrainingError
from sage_grpo.train.limits import limits
from sage_grpo.train.metrics import Stopwatch, UpdateStats, peak_memory, reward_part, reward_record
from sage_grpo.train.reward_checks import from_all_ranks, rescored, rescoring_record, trial_error
from sage_grpo.train.rollout import RolloutData, RolloutSampler, Trajectory
from sage_grpo.train.saving import Saves
from sage_grpo.train.state import TrainState
from sage_grpo.train.update import Objective, anchor_velocities
from sage_grpo.train.validation import Validation
from sage_grpo.train.windows import build_windows
from sage_grpo.worlds.registry import World

# iterations between diagnoses; one also follows the first iteration and each validation
DIAGNOSIS_INTERVAL = 25


@dataclass(frozen=True, eq=False)
class Backward:
    """One backward pass of an update: one denoising step of each clip of a trajectory."""

    trajectory: Trajectory
    advantages: Tensor  # (B,) fp32, those of its clips
    positions: Tensor  # (B,) where in its window each clip's step is


@dataclass
class Accumulation:
    """Rollouts that await their optimizer step."""

    stats: UpdateStats
    has_advantage: bool = False  # whether any of their clips has a nonzero one
    # for each backward its clips, and which of them had a finite loss and gradient
    finite: list[tuple[MicroBatch, Tensor]] = field(default_factory=list)


@dataclass(eq=False)
class Trainer:
    """A run. `build.py` assembles one."""

    config: Config
    ranks: Ranks
    backbone: Backbone
    algorithm: Algorithm
    state: TrainState
    requests: Sequence[Request]  # what is trained on
    guidance: Guidance
    reward: Composite | None  # None on ranks that are not leaders of a sequence-parallel group
    gold: Gold | None  # the world's oracle: measured, never trained on
    validation: Validation | None
    run: RunFolder
    fingerprints: Mapping[str, Any]  # what the run was started with
    world: World | None = None  # of the model, if it has one
    resumed_from: Path | None = None

    def __post_init__(self) -> None:
        c = self.config

        # the method
        self.schedule = self.algorithm.schedule().to(self.ranks.device)
        learns = self.backbone.learns_at(self.schedule.sigmas[:-1], c.adapted_experts)
        self.windows = build_windows(c.window_form, self.schedule.stochastic & learns, c.seed)
        self.trained_guidance = self.algorithm.trained_guidance(self.guidance)
        self.shape = self.backbone.latent_shape(c.num_frames, c.height, c.width)

        # parts of the state that the loop works with
        self.optimization = self.state.optimization
        self.anchor = self.state.anchor
        self.controller = self.state.controller
        self.accumulated = self.no_accumulation()
        self.ratio_checked = False
        self.reward_checked = False
        self.limits_measured = False
        self.half_gradient = HalfGradient(
            self.optimization.parameters.values(),
            self.ranks,
            reduces_gradients_once=c.reduces_gradients_once,
        )
        if not self.algorithm.independent_steps and c.batch_size % c.num_generations:
            self.half_gradient.is_known = False  # a rank holds a part of a group

        # services
        self.guards = Guards(self.ranks, self.run, c.collective_timeout)
        export = Export(
            backbone=self.backbone,
            config=c,
            ranks=self.ranks,
            run=self.run,
            reward=self.reward,
            base_weights=self.fingerprints.get("base weights", "unknown"),
        )
        self.saves = Saves(
            state=self.state,
            config=c,
            ranks=self.ranks,
            guards=self.guards,
            folder=self.run.checkpoints,
            export=export,
            fingerprints=self.fingerprints,
        )
        # context for many forwards in a row; FSDP: weights stay unsharded between them
        self.keep_unsharded = partial(
            keep_unsharded, self.backbone.transformer, wanted=c.gather_for_rollout
        )

    @property
    def step(self) -> int:
        """Completed iterations."""
        return self.state.step

    @property
    def settled_step(self) -> int:
        """The last iteration whose gradients are in the weights."""
        return self.state.settled_step

    def train(self) -> None:
        """Run the remaining iterations; validate and save as configured and at the end; also save on a signal."""
        with (
            self.guards.watching(self.step, self.saves.begin, self.saves.continue_writing),
            self.progress() as bar,
        ):
            self.try_reward()
            self.catch_up()
            while self.step < self.config.max_steps:
                # each phase begins at a safe point: stop if told, commit a save
                watch = Stopwatch(self.ranks.device, on_phase=self.enter)
                with watch.phase("rollout"):
                    batch = self.roll_out()
                with watch.phase("decode"):
                    clips = self.decode(batch)
                with watch.phase("reward"):
                    scores = self.score(batch, clips)
                    rescoring = self.rescore_once(batch, clips)
                with watch.phase("gold"):
                    gold = self.measure_gold(batch, clips)
                advantages = self.advantages(scores)
                self.show_extremes(batch, clips, scores)
                with watch.phase("anchor"):
                    batch, trained_advantages = self.select(batch, advantages)
                    self.prepare_anchor(batch)
                with watch.phase("update"):
                    record = self.update(batch, trained_advantages)
                self.state.step += 1

                record.update(
                    reward_record(scores, trained_advantages, self.config.num_generations)
                )
                record.update(rescoring)
                record.update(gold)
                record.update(watch.record())
                if self.is_logged(self.step):
                    record.update(self.diagnosis_metrics(clips, scores))
                self.log(record, bar)
                self.finish_iteration()

    @contextmanager
    def progress(self) -> Iterator[tqdm]:
        """Progress bar, and heartbeat for the guards: ticks on every model forward and every reward batch."""
        heartbeat = self.backbone.transformer.register_forward_pre_hook(
            lambda *_: self.guards.beat()
        )
        holdout_reward = self.validation.holdout_reward if self.validation else None
        for reward in (self.reward, holdout_reward):
            if reward is not None:
                reward.on_batch = self.guards.beat
        bar = tqdm(
            total=self.config.max_steps,
            initial=self.step,
            unit="it",
            disable=not self.ranks.is_first,
        )
        with heartbeat, bar:
            yield bar

    def enter(self, phase: str) -> None:
        """Begin the next phase, at a safe point."""
        self.guards.note(phase)
        self.safe_point()

    def safe_point(self, inside: bool = False) -> None:
        """Stop if told to, and commit a checkpoint whose files are on disk. A collective: all ranks must call.

        inside: whether this is in the middle of a phase. With prompts_per_forward > 1 it then does nothing, because
        ranks may run different numbers of micro-batches.
        """
        if not inside or self.config.prompts_per_forward == 1:
            self.guards.stop_if_told()
            self.saves.continue_writing()

    def try_reward(self) -> None:
        """Score a made-up clip on every rank: a reward that always fails ends the run before anything is sampled."""
        c = self.config
        shape = (c.num_frames, c.height, c.width)

        def errors_of(reward: Composite | None, request: Request) -> list[str]:
            error = self.ranks.from_leader(lambda: trial_error(reward, request, shape, c.fps))
            return [text for text in self.ranks.texts(error) if text]

        errors = errors_of(self.reward, self.requests[0])
        failed_fraction = len(errors) / self.ranks.dp_size
        if failed_fraction > c.max_reward_failures:
            raise TrainingError(
                f"{failed_fraction:.0%} of the rewards failed on a made-up clip, before anything was sampled: "
                f"{errors[0]}; fix the reward, or set --max_reward_failures 1 to train anyway"
            )
        if self.validation and c.holdout_reward:
            held_out_errors = errors_of(self.validation.holdout_reward, self.validation.requests[0])
            if held_out_errors and c.stop_on_hacking:
                raise TrainingError(
                    f"the held-out reward failed on a made-up clip: {held_out_errors[0]};"
                    " fix it, because with --stop_on_hacking True it decides when the run ends"
                )
            errors += held_out_errors
        if errors:
            self.ranks.log_once(f"a reward failed on a made-up clip: {errors[0]}")

    def catch_up(self) -> None:
        """Run the validation that a series begins with, or one that an interrupted run missed.

        A series begins with the run, and again where a resumed run changes the yardstick.
        """
        is_due = False
        if self.ranks.is_first:
            validated = self.run.validated_steps()
            begins = self.config.validate_at_step0 and not validated
            scheduled = self.step > 0 and self.is_due(self.config.validation_interval)
            is_due = begins or (scheduled and self.step not in validated)
        if self.ranks.any(is_due):
            self.validate()

    def micro_batches(self) -> list[MicroBatch]:
        """This rank's micro-batches for this iteration, each of one prompt."""
        c = self.config
        num_groups = c.batch_size * self.ranks.dp_size // c.num_generations
        prompt_indices = draw_prompts(self.step, num_groups, len(self.requests), c.seed)
        return plan_micro_batches(
            prompt_indices,
            group_size=c.num_generations,
            batch_size=c.batch_size,
            dp_rank=self.ranks.dp_rank,
            micro_batch_size=c.micro_batch_size,
        )

    def roll_out(
        self, micro_batches: Sequence[MicroBatch] | None = None, schedule: Schedule | None = None
    ) -> list[Trajectory]:
        """Sample trajectories for `micro_batches`, by default this rank's share of the iteration.

        schedule: the doctor passes one of its own; clips then explore with its noise, whatever the algorithm.
        """
        c = self.config
        if micro_batches is None:
            micro_batches = self.micro_batches()
        sampler = self.rollout_sampler(micro_batches, schedule)
        joined = join_micro_batches(micro_batches, sampler.conditions, c.prompts_per_forward)

        batch = []
        for micro_batch in joined:
            self.safe_point(inside=True)
            # nft samples with its old policy; otherwise that is empty, and the trained weights sample
            with self.optimization.using(self.optimization.old_policy), self.keep_unsharded():
                batch.append(sampler.roll_out(micro_batch))
        return batch

    def rollout_sampler(
        self, micro_batches: Sequence[MicroBatch], schedule: Schedule | None = None
    ) -> RolloutSampler:
        """What samples these micro-batches in this iteration, with their prompts encoded."""
        ids = [clip_id for micro_batch in micro_batches for clip_id in micro_batch]
        prompt_indices = list(dict.fromkeys(clip_id.prompt_index for clip_id in ids))
        encoded = self.backbone.encode([self.requests[index] for index in prompt_indices])
        conditions = {
            index: cond.to(self.ranks.device)
            for index, cond in zip(prompt_indices, encoded, strict=True)
        }
        sampler_class = self.algorithm.sampler if schedule is None else ExploringSampler
        return sampler_class(
            backbone=self.backbone,
            schedule=schedule or self.schedule,
            windows=self.windows,
            guidance=self.guidance,
            shape=self.shape,
            config=self.config,
            iteration=self.step,
            conditions=conditions,
        )

    def decode(self, batch: Sequence[Trajectory]) -> list[Tensor | None]:
        """uint8 clips (F, H, W, 3) on the CPU; None where the trajectory or the pixels are not finite."""
        full_latents = [
            self.backbone.full_latents(trajectory.data.latents, trajectory.cond)
            for trajectory in batch
        ]
        latents = torch.cat(full_latents).split(1)
        is_finite = torch.cat([trajectory.is_finite for trajectory in batch]).tolist()
        clips = self.ranks.shared(latents, lambda part: decoded(self.backbone, part))
        return [clip if finite else None for clip, finite in zip(clips, is_finite, strict=True)]

    def requests_of(self, batch: Sequence[Trajectory]) -> list[Request]:
        """The request of each of this rank's clips."""
        return [
            self.requests[clip_id.prompt_index]
            for trajectory in batch
            for clip_id in trajectory.micro_batch
        ]

    def score(self, batch: Sequence[Trajectory], clips: Sequence[Tensor | None]) -> Scores:
        """Scores of the full batch and the first error from each rank; too many failures stop the run."""
        rank_scores = self.ranks.from_leader(
            lambda: self.reward.score(clips, self.requests_of(batch), self.config.fps)
        )
        named = {name: self.ranks.gather(values) for name, values in rank_scores.named.items()}
        total = self.ranks.gather(rank_scores.total)
        scores = Scores(total, named, weights=rank_scores.weights)
        failed = ~total.isfinite()
        if failed.any():  # the scores are gathered, so this holds on all ranks or on none
            first_error = rank_scores.errors[0] if rank_scores.errors else ""
            errors = [text for text in self.ranks.texts(first_error) if text]
            scores.errors = errors or ["a clip could not be decoded: its numbers are not finite"]

        failed_fraction = failed.double().mean().item()
        limit = self.config.max_reward_failures
        if failed_fraction > limit:
            raise TrainingError(
                f"iteration {self.step + 1}: {failed_fraction:.0%} of the rewards failed, more than "
                f"max_reward_failures ({limit:.0%}); the first error was: {scores.errors[0]}"
            )
        return scores

    def measure_gold(
        self, batch: Sequence[Trajectory], clips: Sequence[Tensor | None]
    ) -> dict[str, float]:
        """The oracle's metrics, for reporting only; nothing in training depends on them."""
        if not self.is_logged(self.step + 1):
            return {}
        rank_gold = self.ranks.from_leader(
            lambda: gold_metrics(self.gold, clips, self.requests_of(batch))
        )
        # a rank that has no clip to measure knows no names
        rank_names = self.ranks.texts(" ".join(rank_gold))
        names = dict.fromkeys(name for text in rank_names for name in text.split())
        missing = torch.full((len(clips),), math.nan, dtype=torch.float64)
        return {
            f"gold/{name}": self.ranks.gather(rank_gold.get(name, missing)).nanmean().item()
            for name in names
        }

    def advantages(self, scores: Scores) -> Advantages:
        """Advantages over all ranks: rows are clips in the order of the batch, rank by rank.

        Groups are contiguous, because joined micro-batches keep the clips of a group together.
        """
        c = self.config
        groups = torch.arange(len(scores.total)) // c.num_generations
        if c.advantage_per_score:
            return score_advantages(
                scores.named,
                scores.weights,
                groups,
                advantage_std=c.advantage_std,
                adv_clip_max=c.adv_clip_max,
            )
        return group_advantages(
            scores.total, groups, advantage_std=c.advantage_std, adv_clip_max=c.adv_clip_max
        )

    def select(
        self, batch: Sequence[Trajectory], advantages: Advantages
    ) -> tuple[Sequence[Trajectory], Advantages]:
        """The clips to train with all that training needs of them, and their advantages.

        With `train_clips`, the best and the worst of each group, in equal numbers on every rank; else all.
        """
        c = self.config
        rows = extreme_rows(
            advantages.values,
            usable=advantages.trained,
            group_size=c.num_generations,
            count=c.group_trained,
        )
        trained_advantages = advantages.at(rows)
        if len(rows) < len(advantages.values):
            batch = self.regroup(batch, rows)
            # those of a full group add up to 0, apart from clipped ones; those of a part need not
            if c.center_trained:
                trained_advantages = centered(trained_advantages, c.group_trained)
        return self.prepare_for_training(batch), trained_advantages

    def regroup(self, batch: Sequence[Trajectory], rows: Tensor) -> list[Trajectory]:
        """New trajectories of the clips in these `rows` of the full batch; each rank gets an equal number of rows.

        If groups are spread over ranks, clips move to ranks that have fewer of the rows.
        """
        c = self.config
        ids = [clip_id for trajectory in batch for clip_id in trajectory.micro_batch]
        all_ids = self.ranks.gather(torch.tensor(ids))
        wanted = rows.view(self.ranks.dp_size, -1).tolist()

        chosen_ids = [ClipId(*all_ids[row].tolist()) for row in wanted[self.ranks.dp_rank]]
        micro_batches = split_clips(chosen_ids, c.trained_micro_batch)
        sampler = self.rollout_sampler(micro_batches)
        joined = join_micro_batches(micro_batches, sampler.conditions, c.prompts_per_forward)
        ends = list(itertools.accumulate(len(micro_batch) for micro_batch in joined))

        def moved(part: Callable[[Trajectory], Tensor]) -> list[Tensor]:
            """A part of each chosen clip, stacked by micro-batch: those of different ones may differ in shape."""
            rank_rows = [row for trajectory in batch for row in part(trajectory)]
            taken = self.ranks.take(rank_rows, wanted)
            return [torch.stack(taken[a:b]) for a, b in itertools.pairwise([0, *ends])]

        parts = {part.name: moved(attrgetter(f"data.{part.name}")) for part in fields(RolloutData)}
        is_finite = moved(lambda trajectory: trajectory.is_finite.float())
        trajectories = []
        for number, micro_batch in enumerate(joined):
            data = RolloutData(**{name: stacked[number] for name, stacked in parts.items()})
            trajectories.append(sampler.trajectory(micro_batch, data, is_finite[number].bool()))
        return trajectories

    def prepare_for_training(self, batch: Sequence[Trajectory]) -> list[Trajectory]:
        """These trajectories with all that training needs, computed by the policy that sampled them."""
        if self.algorithm.explores and not self.config.trains_in_new_batches:
            return list(batch)  # the rollout has kept everything
        sampler = self.rollout_sampler([trajectory.micro_batch for trajectory in batch])
        prepared = []
        for trajectory in batch:
            self.safe_point(inside=True)
            with self.optimization.using(self.optimization.old_policy), self.keep_unsharded():
                prepared.append(sampler.prepare_for_training(trajectory))
        return prepared

    def prepare_anchor(self, batch: Sequence[Trajectory]) -> None:
        """Store the anchor's velocities along the rollout; while it equals the policy, the rollout's are used."""
        if self.anchor is None:
            return
        if self.anchor.age == 0 and not self.config.samples_with_old_policy:
            return
        with self.anchor.active(), self.keep_unsharded():
            for trajectory in batch:
                trajectory.anchor_velocity = anchor_velocities(
                    self.backbone, self.trained_guidance, self.schedule, trajectory
                )

    def update(self, batch: Sequence[Trajectory], advantages: Advantages) -> dict[str, Any]:
        """Train the rollout's steps in `updates_per_rollout` parts, each followed by an optimizer step unless gradients
        accumulate over more rollouts.
        """
        c = self.config
        record: dict[str, Any] = {
            "lr": self.optimization.learning_rate,
            "kl/coef": self.controller.kl_lambda,
        }
        num_trained = batch[0].trained_positions.shape[1]
        total = self.no_stats()
        parts = torch.arange(num_trained).tensor_split(c.updates_per_rollout)
        for number, turns in enumerate(parts):
            # later parts see changed weights, so a stop between them would lose the iteration
            stats = self.accumulate(batch, advantages, turns.tolist(), interruptible=number == 0)
            total += stats
            if (self.step + 1) % c.gradient_accumulation_steps == 0:
                grad_norm = self.optimizer_step()
                record["policy/grad_norm"] = grad_norm
                record["policy/grad_rms"] = self.optimization.rms(grad_norm)
        record.update(total.record())
        record["updates"] = self.optimization.updates
        record["policy/skipped_updates"] = self.optimization.skipped
        return record

    def accumulate(
        self,
        batch: Sequence[Trajectory],
        advantages: Advantages,
        turns: Sequence[int],
        interruptible: bool,
    ) -> UpdateStats:
        """Add the gradient of the steps that each clip trains in these turns, one backward per turn and micro-batch.

        In turn k, a clip trains the k-th of its `trained_positions`.
        """
        c = self.config
        num_pairs = c.gradient_accumulation_steps * len(advantages.values) * len(turns)
        objective = Objective(
            backbone=self.backbone,
            algorithm=self.algorithm,
            guidance=self.trained_guidance,
            schedule=self.schedule,
            kl_lambda=self.controller.kl_lambda,
            num_pairs=num_pairs,
        )
        stats = self.no_stats()
        clip_advantages = self.advantages_by_trajectory(batch, advantages)
        blocks = self.independent_blocks(batch, clip_advantages, turns)
        earlier_blocks = self.step % c.gradient_accumulation_steps * len(blocks)
        for number, block in enumerate(blocks, 1):
            for backward in block:
                if interruptible:
                    self.safe_point(inside=True)
                is_last = backward is blocks[-1][-1]
                reduce_gradients_in_next_backward(
                    self.backbone.transformer, is_last or not c.reduces_gradients_once
                )
                finite = objective.backward(
                    backward.trajectory, backward.positions, backward.advantages, stats
                )
                self.accumulated.finite.append((backward.trajectory.micro_batch, finite))
            self.half_gradient.record_if_half(
                done=earlier_blocks + number, total=c.gradient_accumulation_steps * len(blocks)
            )

        stats.sum_over(self.ranks)
        self.check_first_ratio(stats)
        self.accumulated.stats += stats
        if advantages.trained.any():
            self.accumulated.has_advantage = True
        return stats

    def independent_blocks(
        self,
        batch: Sequence[Trajectory],
        clip_advantages: Sequence[Tensor],
        turns: Sequence[int],
    ) -> list[list[Backward]]:
        """The backwards of an update, in blocks whose gradient noise is independent.

        Only `HalfGradient` needs the blocks; the sum of the gradients is the same.
        """

        def backward_of(trajectory: Trajectory, advantages: Tensor, turn: int) -> Backward:
            return Backward(trajectory, advantages, trajectory.trained_positions[:, turn])

        rows = list(zip(batch, clip_advantages, strict=True))
        if self.algorithm.independent_steps:
            return [
                [backward_of(trajectory, advantages, turn)]
                for turn in turns
                for trajectory, advantages in rows
            ]

        # Clips of a group are compared with each other: their advantages add up to 0. What all clips pull at cancels
        # in a group but not in a part of it, so a block is a whole group.
        blocks: list[list[Backward]] = []
        groups: set[GroupId] = set()  # of the last block
        for trajectory, advantages in rows:
            backwards = [backward_of(trajectory, advantages, turn) for turn in turns]
            trajectory_groups = {
                group_of(clip_id, self.config.num_generations) for clip_id in trajectory.micro_batch
            }
            if groups & trajectory_groups:
                blocks[-1] += backwards
                groups |= trajectory_groups
            else:
                blocks.append(backwards)
                groups = trajectory_groups
        return blocks

    def advantages_by_trajectory(
        self, batch: Sequence[Trajectory], advantages: Advantages
    ) -> Sequence[Tensor]:
        """This rank's rows of the advantages, split as its clips are into trajectories."""
        num_rows = len(advantages.values) // self.ranks.dp_size
        first = self.ranks.dp_rank * num_rows
        rank_advantages = advantages.values[first : first + num_rows]
        rank_advantages = rank_advantages.to(self.ranks.device, torch.float32)
        split = rank_advantages.split([trajectory.size for trajectory in batch])
        # awm and nft noise a clip after it is scored: the result may be non-finite even if the clip is finite
        return [
            clip_advantages.where(trajectory.is_finite, 0.0)
            for trajectory, clip_advantages in zip(batch, split, strict=True)
        ]

    def no_stats(self) -> UpdateStats:
        return UpdateStats(self.schedule.num_steps, self.ranks.device)

    def no_accumulation(self) -> Accumulation:
        return Accumulation(self.no_stats())

    def check_first_ratio(self, stats: UpdateStats) -> None:
        """Once per run: unless the rollout's policy lags behind, the first ratio must be exactly 1, resumed or not."""
        if self.ratio_checked:
            return
        self.ratio_checked = True
        has_lag = self.config.samples_with_old_policy and self.optimization.updates > 0
        deviation = stats.max_deviation.max().item()
        if deviation and not has_lag:
            raise TrainingError(
                f"the first ratio differs from 1 by {deviation:.3g}: rollout and training run different "
                "arithmetic (another kernel, precision or batch shape), and every gradient would be wrong"
            )

    def optimizer_step(self) -> float:
        """Step on the gradients of all ranks, if they are finite and a clip has an advantage; returns their norm."""
        self.ranks.sum_gradients(self.optimization.parameters.values())
        grad_norm = self.optimization.clip()
        self.half_gradient.estimate_signal(grad_norm)
        if self.optimization.should_step(grad_norm, self.accumulated.has_advantage):
            self.optimization.step()
            if self.ranks.any(not self.optimization.is_finite):
                raise self.saves.diverged(
                    f"the weights are not finite after iteration {self.step + 1}"
                )
            if self.anchor:
                self.anchor.age += 1
            kl = "kl_anchor" if self.config.trust_region.anchor else "kl_rollout"
            self.controller.update(self.accumulated.stats.mean(kl))
        else:
            self.optimization.count_skip(grad_norm)
        if self.optimization.skipped_in_a_row > MAX_SKIPPED:
            raise self.saves.diverged(
                f"the gradient was not finite {self.optimization.skipped_in_a_row} times in a row, "
                f"at last in iteration {self.step + 1} at {self.first_nonfinite_clip()} "
                f"with seed {self.config.seed}"
            )
        self.optimization.zero_grad()
        self.accumulated = self.no_accumulation()
        return grad_norm

    def first_nonfinite_clip(self) -> str:
        """The first clip of this optimizer step whose loss or gradient is not finite, on any rank."""
        rank_text = ""
        for micro_batch, finite in self.accumulated.finite:
            if not finite.all():
                clip_id = micro_batch[int((~finite).nonzero()[0])]
                rank_text = f"{self.requests[clip_id.prompt_index].text!r}, clip {clip_id.sample}"
                break
        return next((text for text in self.ranks.texts(rank_text) if text), "the parameters")

    def finish_iteration(self) -> None:
        """Called between iterations: refresh the anchor; validate and save when due and at the end."""
        c = self.config
        if self.anchor:
            self.anchor.refresh_if_due()
        self.measure_limits_once()
        if self.is_due(c.save_interval) or self.saves.is_due:
            self.saves.begin(must=self.step == c.max_steps)
        if self.is_due(c.validation_interval):
            self.validate()
        if self.is_due(c.validation_interval) or self.step % DIAGNOSIS_INTERVAL == 1:
            self.run.diagnose(self.step)

    def measure_limits_once(self) -> None:
        """After the first iteration of a start: what samples of the model's world can reach at best."""
        if self.limits_measured:
            return
        self.limits_measured = True
        if self.world and self.ranks.is_first:
            requests = self.validation.requests if self.validation else self.requests
            measure = partial(
                limits,
                world=self.world,
                backbone=self.backbone,
                reward=self.reward,
                requests=requests,
                config=self.config,
            )
            self.run.log_limits(self.step, measure)

    def is_due(self, interval: int) -> bool:
        """Whether something scheduled every `interval` iterations, and at the end, is due now."""
        scheduled = bool(interval) and self.step % interval == 0
        return scheduled or self.step == self.config.max_steps

    def validate(self) -> None:
        if self.validation is None:
            return
        watch = Stopwatch(self.ranks.device, on_phase=self.enter)
        with watch.phase("validation"), self.optimization.using(self.optimization.average):
            record = self.validation.run(
                self.run.validation_folder(self.step),
                between=lambda: self.safe_point(inside=True),
                keep_unsharded=self.keep_unsharded,
            )
        verdict = self.run.divergence(self.step)  # None on all ranks but the first
        hacking = self.ranks.from_leader(lambda: "".join(self.ranks.texts(verdict or "")))
        if self.config.holdout_reward:
            record["holdout/diverged"] = None if verdict is None else int(bool(verdict))
        record.update(watch.record())
        self.run.log_validation(self.step, record)
        self.saves.renew_card()
        if self.config.stop_on_hacking and hacking:
            raise TrainingError(hacking)

    def diagnosis_metrics(self, clips: Sequence[Tensor | None], scores: Scores) -> dict[str, Any]:
        """Metrics for the diagnosis; all ranks must call."""
        return diagnosis_metrics(
            state=self.state,
            ranks=self.ranks,
            clips=clips,
            scores=scores,
            group_size=self.config.num_generations,
            signal_fraction=self.half_gradient.signal_fraction,
            start=f"{self.fingerprints}, seed {self.config.seed}",
        )

    def show_extremes(
        self, batch: Sequence[Trajectory], clips: Sequence[Tensor | None], scores: Scores
    ) -> None:
        """Keep the best and the worst clip of a group to look at; those of the first rank are enough."""
        c = self.config
        if not self.ranks.is_first or not c.rollout_videos or not self.is_logged(self.step + 1):
            return
        ids = [clip_id for trajectory in batch for clip_id in trajectory.micro_batch]
        totals = scores.total[: len(ids)].tolist()  # the first rank's rows come first
        for position, clip in enumerate(clips):
            if clip is None:
                totals[position] = math.nan
        chosen = extremes(totals, [group_of(clip_id, c.num_generations) for clip_id in ids])
        if chosen is None:
            return

        records = []
        for position in chosen:
            clip_scores = {name: values[position].item() for name, values in scores.named.items()}
            clip_scores["total"] = totals[position]
            text = self.requests[ids[position].prompt_index].text
            records.append(record_of(text, ids[position].sample, clip_scores))
        self.run.show_rollouts(self.step + 1, [clips[i] for i in chosen], records, c.fps)

    def rescore_once(
        self, batch: Sequence[Trajectory], clips: Sequence[Tensor | None]
    ) -> dict[str, Any]:
        """In the first logged iteration after a start: metrics of a few clips, scored again as in validations."""
        if self.reward_checked or not self.is_logged(self.step + 1):
            return {}
        self.reward_checked = True
        scored_again = self.ranks.from_leader(
            lambda: rescored(self.reward, clips, self.requests_of(batch), self.config.fps)
        )
        return rescoring_record(from_all_ranks(self.ranks, scored_again))

    def log(self, record: dict[str, Any], bar: tqdm) -> None:
        record["kl/anchor_age"] = self.anchor.age if self.anchor else None
        record["memory/peak_gb"] = peak_memory()
        self.guards.step = self.step
        self.guards.report("running")
        if self.is_logged(self.step):
            self.run.log("train", self.step, record)
        else:
            self.run.log("reward", self.step, reward_part(record))

        shown = {
            "reward": record["reward/total"],
            "kl": record["kl/anchor"],
            "match": record.get("gold/match"),
            "clips/h": 3600 * self.config.batch_size * self.ranks.dp_size / record["time/total"],
        }
        texts = {name: rounded(value) for name, value in shown.items() if value is not None}
        bar.set_postfix(texts, refresh=False)
        bar.update()

    def is_logged(self, step: int) -> bool:
        """Whether iteration `step` writes all of its metrics; of the others, only the reward is kept."""
        return step % self.config.log_interval == 0 or step == self.config.max_steps


def rounded(value: float) -> str:
    """A number with three significant digits, without an exponent up to a million: 1230, not 1.23e+03."""
    three_digits = float(f"{value:.3g}")
    return f"{three_digits:g}"
