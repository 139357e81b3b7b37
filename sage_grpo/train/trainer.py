"""GRPO post-training, one loop for every size: prompts, rollout, score, advantage, update."""

import math
import resource
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sage_grpo.algo.grpo import Advantages, group_advantages
from sage_grpo.algo.sde import Schedule, build_schedule, flow_sigmas
from sage_grpo.config import Config
from sage_grpo.data.prompts import Prompt
from sage_grpo.models.hunyuan15 import Hunyuan15
from sage_grpo.models.policy import BrokenClip
from sage_grpo.parallel.fsdp import gathered, reduce_gradients_in_next_backward
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.composite import Composite, Scores
from sage_grpo.train.anchor import Anchor
from sage_grpo.train.checkpoint import CheckpointError
from sage_grpo.train.guards import Guards, StepVote, TrainingError, check_rewards
from sage_grpo.train.metrics import Stopwatch, UpdateStats
from sage_grpo.train.optimization import Optimization
from sage_grpo.train.rollout import (
    Guidance,
    Piece,
    Trajectory,
    exploring_steps,
    plan,
    prompt_positions,
    roll_out,
    training_order,
)
from sage_grpo.train.run import Run
from sage_grpo.train.update import Objective, anchor_velocities
from sage_grpo.train.validation import Gold, Validation, gold_columns


class Trainer:
    """What a run is made of; `step` counts the iterations done. `build.py` puts one together."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        policy: Hunyuan15,
        optimization: Optimization,
        anchor: Anchor | None,
        prompts: Sequence[Prompt],
        guidance: Guidance,
        reward: Composite,
        gold: Gold | None,
        validation: Validation | None,
        run: Run,
    ) -> None:
        self.config, self.ranks, self.policy, self.run = config, ranks, policy, run
        self.optimization, self.anchor, self.controller = optimization, anchor, config.kl_controller()
        self.prompts, self.guidance, self.reward, self.gold = list(prompts), guidance, reward, gold
        self.validation = validation
        sigmas = flow_sigmas(config.num_sampling_steps, config.timestep_shift)
        self.sampler = build_schedule(config.sde_type, sigmas, config.eta).to(ranks.device)
        self.shape = policy.latent_shape(config.num_frames, config.height, config.width)
        self.guards, self.vote = Guards(ranks, run.folder, config.collective_timeout), StepVote()
        self.step, self.saved_step, self.save_failed = 0, -1, False
        self.trained_since_update, self.ratio_checked = False, False
        # of accumulated rollouts that wait for their optimizer step: what they measured, and which clips were finite
        self.pending: list[UpdateStats] = []
        self.finite: list[tuple[Piece, Tensor]] = []

    def train(self) -> None:
        """Run the iterations that are left; validate and save as configured, at the end, and save at a signal."""
        with self.guards.watching(self.step, self.save), self.progress() as bar:
            self.catch_up()
            while self.step < self.config.max_steps:
                watch = Stopwatch(self.ranks.device, self.guards.enter)
                schedule = self.schedule()
                with watch.phase("rollout"):
                    batch = self.roll_out(schedule)
                with watch.phase("decode"):
                    clips = self.decode(batch)
                with watch.phase("reward"):
                    scores = self.score(batch, clips)
                with watch.phase("gold"):
                    gold = self.measure_gold(batch, clips)
                advantages = self.advantages(scores)
                with watch.phase("anchor"):
                    self.prepare_anchor(batch, schedule)
                with watch.phase("update"):
                    record = self.update(batch, schedule, advantages)
                self.step += 1
                record |= self.describe(scores, advantages) | gold | watch.record() | {"memory/peak_gb": peak_memory()}
                self.log(record, bar)
                self.finish_iteration()

    @contextmanager
    def progress(self) -> Iterator[tqdm]:
        """A bar for people, and a heartbeat for the guards: every forward of the model, every batch of the reward."""
        heartbeat = self.policy.transformer.register_forward_pre_hook(lambda *_: self.guards.beat())
        for reward in (self.reward, self.validation and self.validation.holdout):
            if reward:
                reward.on_batch = self.guards.beat
        try:
            words = {"total": self.config.max_steps, "initial": self.step, "unit": "it"}
            with tqdm(**words, disable=not self.ranks.first) as bar:
                yield bar
        finally:
            heartbeat.remove()

    def catch_up(self) -> None:
        """The validation that is due before the first iteration, or that a run did not live to make."""
        due = self.due(self.config.validation_interval) if self.step else self.config.validate_at_step0
        if due and self.ranks.any(self.ranks.first and not self.run.has("validation", self.step)):
            self.validate()

    def schedule(self) -> Schedule:
        """The sampler of this iteration: noise only in its window."""
        steps = exploring_steps(self.config.sde_window, self.sampler.num_steps, self.step, self.config.seed)
        return self.sampler.window(steps.to(self.ranks.device))

    def pieces(self) -> list[Piece]:
        """The micro-batches of this rank in this iteration."""
        c = self.config
        groups = c.batch_size * self.ranks.count // c.num_generations
        positions = prompt_positions(self.step, groups, len(self.prompts), c.seed)
        return plan(positions, c.num_generations, c.batch_size, self.ranks.rank, c.micro_batch_size)

    def roll_out(self, schedule: Schedule, pieces: Sequence[Piece] | None = None) -> list[Trajectory]:
        """The clips of `pieces`, which are this rank's share of the iteration unless others are named."""
        c, batch = self.config, []
        pieces = self.pieces() if pieces is None else pieces
        texts = list(dict.fromkeys(self.prompts[piece.prompt].text for piece in pieces))
        conditions = dict(zip(texts, self.policy.encode(texts), strict=True))
        for piece in pieces:
            self.guards.stop_if_told()
            cond = conditions[self.prompts[piece.prompt].text].to(self.ranks.device)
            order = training_order(
                schedule.stochastic, c.timestep_fraction, c.enable_timestep_permutation, c.seed, self.step, piece
            )
            firsts = [s // c.num_generations * c.num_generations for s in piece.samples] if c.same_init_noise else None
            words = (piece, cond, self.guidance, self.shape, c.seed, self.step, order, firsts)
            with self.gathered():
                batch.append(roll_out(self.policy, schedule, *words))
        return batch

    def gathered(self) -> AbstractContextManager[None]:
        """Context of many forwards, in which the weights of a sharded model may stay gathered."""
        return gathered(self.policy.transformer, self.config.gather_for_rollout)

    def decode(self, batch: Sequence[Trajectory]) -> list[Tensor | None]:
        """uint8 clips (F, H, W, 3) on the CPU; None where the path or the pixels are not finite."""
        latents = torch.cat([trajectory.latents for trajectory in batch]).split(1)
        sound = torch.cat([trajectory.sound for trajectory in batch]).tolist()
        clips = self.ranks.shared(latents, self._decode)
        return [clip if fine else None for clip, fine in zip(clips, sound, strict=True)]

    def _decode(self, latents: Sequence[Tensor]) -> list[Tensor | None]:
        try:
            return [clip.clone() for clip in self.policy.decode(torch.cat(latents)).cpu()]  # sent without the others
        except BrokenClip:  # some pixels are not finite: find out whose
            return [None] if len(latents) == 1 else [clip for latent in latents for clip in self._decode([latent])]

    def score(self, batch: Sequence[Trajectory], clips: Sequence[Tensor | None]) -> Scores:
        """Scores of the whole batch and the first error of each rank; too many failures end the run."""
        mine = self.ranks.from_leader(lambda: self.reward.score(clips, self.texts(batch), self.config.fps))
        named = {name: self.ranks.gather(values) for name, values in mine.named.items()}
        scores = Scores(self.ranks.gather(mine.total), named)
        if not scores.total.isfinite().all():  # on any rank: all of them are here, or none
            errors = [text for text in self.ranks.texts("".join(mine.errors[:1])) if text]
            scores.errors = errors or ["a clip could not be decoded, its numbers are not finite"]
        check_rewards(scores, self.config.max_reward_failures, self.step + 1)
        return scores

    def measure_gold(self, batch: Sequence[Trajectory], clips: Sequence[Tensor | None]) -> dict[str, float]:
        """What the oracle says, for people to read; nothing in training depends on it."""
        if not self.logged(self.step + 1):
            return {}
        columns = self.ranks.from_leader(lambda: gold_columns(self.gold, clips, self.texts(batch)))
        names = dict.fromkeys(name for text in self.ranks.texts(" ".join(columns)) for name in text.split())
        missing = torch.full((len(clips),), math.nan, dtype=torch.float64)  # of a rank that has no clip to measure
        found = {name: self.ranks.gather(columns.get(name, missing)) for name in names}
        return {f"gold/{name}": values.nanmean().item() for name, values in found.items()}

    def advantages(self, scores: Scores) -> Advantages:
        """Over all ranks: rows are clips in the order of the plan, groups one after the other."""
        groups = torch.arange(len(scores.total)) // self.config.num_generations
        return group_advantages(scores.total, groups, self.config.advantage_std, self.config.adv_clip_max)

    def prepare_anchor(self, batch: Sequence[Trajectory], schedule: Schedule) -> None:
        """The anchor's velocities along the rollout; while it equals the policy, the rollout's own serve."""
        if self.anchor is None or self.anchor.is_policy:
            return
        with self.anchor.in_place(), self.gathered():
            for trajectory in batch:
                trajectory.anchor_velocity = anchor_velocities(self.policy, self.guidance, schedule, trajectory)

    def update(self, batch: Sequence[Trajectory], schedule: Schedule, advantages: Advantages) -> dict[str, Any]:
        """Train the steps of the rollout in `updates_per_rollout` parts, an optimizer step after each."""
        c = self.config
        rows = len(advantages.values) // self.ranks.count
        mine = advantages.values[self.ranks.rank * rows :][:rows].to(self.ranks.device, torch.float32)
        pieces = list(zip(batch, mine.split([len(trajectory.x) for trajectory in batch]), strict=True))
        record: dict[str, Any] = {"lr": self.optimization.learning_rate, "kl/coef": self.controller.coef}
        total = UpdateStats.empty(schedule.num_steps, self.ranks.device)
        for update, part in enumerate(torch.arange(batch[0].order.shape[1]).tensor_split(c.updates_per_rollout)):
            pairs = c.gradient_accumulation_steps * len(advantages.values) * len(part)
            goal = Objective(self.policy, self.guidance, schedule, c, self.controller.coef, pairs)
            stats = UpdateStats.empty(schedule.num_steps, self.ranks.device)
            micro_steps = [(column, *piece) for column in part.tolist() for piece in pieces]
            for number, (column, trajectory, advantage) in enumerate(micro_steps, 1):
                if update == 0:  # later, the weights have begun to change
                    self.guards.stop_if_told()
                reduce_gradients_in_next_backward(
                    self.policy.transformer, not c.reduces_once or number == len(micro_steps)
                )
                finite = goal.backward(trajectory, trajectory.order[:, column], advantage, stats)
                self.finite.append((trajectory.piece, finite))
            stats = stats.over(self.ranks)
            self.check_first_ratio(stats)
            self.pending.append(stats)
            self.trained_since_update |= bool(advantages.trained.any())
            total = total + stats
            if (self.step + 1) % c.gradient_accumulation_steps == 0:
                record["policy/grad_norm"] = self.optimizer_step()
        return (
            record
            | total.record()
            | {"updates": self.optimization.updates, "policy/skipped_updates": self.vote.skipped}
        )

    def check_first_ratio(self, stats: UpdateStats) -> None:
        """Once per run: before any update the policy is the rollout's, so every ratio is 1 to the last bit."""
        deviation = stats.policy.max_deviation.max().item()
        if not self.ratio_checked and deviation:
            raise TrainingError(
                f"the first ratio differs from 1 by {deviation:.3g}: rollout and training run different arithmetic "
                "(another kernel, precision or batch shape), and every gradient would be wrong"
            )
        self.ratio_checked = True

    def optimizer_step(self) -> float:
        """Step on the gradients of all ranks, unless they teach nothing or are not finite; returns their norm."""
        self.ranks.sum_gradients(self.optimization.parameters.values())
        norm = self.optimization.clip()
        pending = sum(self.pending[1:], self.pending[0])
        if self.vote.takes(norm, self.trained_since_update):
            self.optimization.step()
            if self.anchor:
                self.anchor.count_update()
            self.controller.update(pending.mean("kl_anchor" if self.config.trust_region.anchor else "kl_rollout"))
        if self.vote.hopeless:
            raise TrainingError(
                f"the gradient was not finite {self.vote.in_a_row} times in a row, at last in iteration "
                f"{self.step + 1} at {self.culprit()} with seed {self.config.seed}: lower learning_rate"
            )
        self.optimization.forget()
        self.pending, self.finite, self.trained_since_update = [], [], False
        return norm

    def culprit(self) -> str:
        """The first clip of this optimizer step whose loss or gradient is not finite, on any rank."""
        clips = ((piece, i) for piece, finite in self.finite for i in (~finite).nonzero().flatten().tolist())
        mine = next((f"{self.prompts[piece.prompt].text!r}, clip {piece.samples[i]}" for piece, i in clips), "")
        return next((text for text in self.ranks.texts(mine) if text), "the parameters")

    def finish_iteration(self) -> None:
        """Between iterations: refresh the anchor; validate and save when it is time, and at the end."""
        if self.anchor:
            self.anchor.refresh_if_due()
        last = self.step == self.config.max_steps
        if self.due(self.config.save_interval) or self.save_failed:
            self.save(must=last)
        if self.due(self.config.validation_interval):
            self.validate()

    def due(self, interval: int) -> bool:
        """Whether something that comes every `interval` iterations, and at the end, comes now."""
        return bool(interval and self.step % interval == 0) or self.step == self.config.max_steps

    @property
    def settled_step(self) -> int:
        """The last iteration whose gradients are in the weights: those of accumulated rollouts are made again."""
        return self.step - self.step % self.config.gradient_accumulation_steps

    def save(self, must: bool = True) -> None:
        """A checkpoint, unless this state has one; if it need not be now, a failure is told and mended later."""
        if self.saved_step == self.settled_step:
            return
        self.guards.note("save")
        try:
            self.run.save(self)
        except CheckpointError as error:
            if must:
                raise TrainingError(str(error)) from error
            self.ranks.say(f"{error}; trying again after the next iteration")
            self.save_failed = True
            return
        self.saved_step, self.save_failed = self.settled_step, False

    def validate(self) -> None:
        if self.validation is None:
            return
        watch, folder = Stopwatch(self.ranks.device, self.guards.enter), self.run.validation_folder(self.step)
        with watch.phase("validation"), self.optimization.averaged(), self.gathered():
            record = self.validation.run(folder, self.guards.stop_if_told)
        hacked = self.ranks.from_leader(lambda: "".join(self.ranks.texts(self.run.divergence(self.step))))
        record |= {"holdout/diverged": int(bool(hacked))} if self.config.holdout_reward else {}
        self.run.validated(self.step, record | watch.record(), folder)
        if self.config.stop_on_hacking and hacked:
            raise TrainingError(hacked)

    def describe(self, scores: Scores, advantages: Advantages) -> dict[str, Any]:
        """The reward and the trust region in numbers."""
        total = scores.total
        groups = total.view(-1, self.config.num_generations)
        spread = (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean()
        record = {"reward/total": total.nanmean(), "reward/std": (total - total.nanmean()).square().nanmean().sqrt()}
        record |= {"reward/group_std": spread} | {f"reward/{n}": values.nanmean() for n, values in scores.named.items()}
        counts = {"failed": advantages.failed, "starved_groups": advantages.starved_groups}
        counts |= {"flat_groups": advantages.flat_groups}
        anchor_age = self.anchor.age if self.anchor else None
        return (
            {name: value.item() for name, value in record.items()}
            | {f"reward/{name}": value for name, value in counts.items()}
            | ({"reward/error": scores.errors[0]} if scores.errors else {})
            | {"kl/anchor_age": anchor_age}
        )

    def log(self, record: dict[str, Any], bar: tqdm) -> None:
        self.guards.step = self.step
        self.guards.report("running")
        if self.logged(self.step):
            self.run.log("train", self.step, record)
        shown = {"reward": record["reward/total"], "kl": record["kl/anchor"], "match": record.get("gold/match")}
        bar.set_postfix({k: f"{v:.3g}" for k, v in shown.items() if v is not None}, refresh=False)
        bar.update()

    def logged(self, step: int) -> bool:
        """Whether the metrics of the iteration that ends as number `step` are written."""
        return step % self.config.log_interval == 0 or step == self.config.max_steps

    def texts(self, batch: Sequence[Trajectory]) -> list[str]:
        """The prompt of each of this rank's clips."""
        return [self.prompts[t.piece.prompt].text for t in batch for _ in t.piece.samples]


def peak_memory() -> float:
    """GB: of the GPU, or of the process where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
