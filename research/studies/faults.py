"""Faults that research/studies/diagnosis_check.py injects into short runs, and the finding that should name each."""

import copy
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sage_grpo.train import anchor
from sage_grpo.train.trainer import Trainer

Inject = Callable[[Trainer], None]
Rescore = Callable[[Tensor, Trainer, Sequence[Tensor]], Tensor]  # scores (B,), trainer, clips

CHANCE = torch.Generator().manual_seed(0)


def no_injection(trainer: Trainer) -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """Flags that differ from a healthy run, or code that breaks it, and the finding that should name it."""

    finding: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    inject: Inject = no_injection
    ranks: int = 1


def rescored(change: Rescore, validation: bool = False) -> Inject:
    """Pass the scores of every call through `change`; with `validation`, those of validations as well."""

    def inject(trainer: Trainer) -> None:
        reward = next(iter(trainer.reward.rewards.values()))
        broken = copy.copy(reward)

        def score(clips: list[Tensor], prompts: list[str], fps: float) -> dict[str, Tensor]:
            scores = reward.score(clips, prompts, fps)
            return {name: change(values, trainer, clips) for name, values in scores.items()}

        broken.score = score
        trainer.reward = copy.copy(trainer.reward)
        trainer.reward.rewards = dict.fromkeys(trainer.reward.rewards, broken)
        if validation:
            trainer.validation.reward = trainer.reward

    return inject


def unavailable(values: Tensor, trainer: Trainer, clips: Sequence[Tensor]) -> Tensor:
    """Fail with a probability of 0.1 per score, which for two scores is a fifth of the calls."""
    if torch.rand((), generator=CHANCE) < 0.1:
        raise ConnectionError("the server did not answer")
    return values


def constant(values: Tensor, trainer: Trainer, clips: Sequence[Tensor]) -> Tensor:
    """Score a seventh of the clips 0."""
    failed = torch.tensor([int(clip.sum()) % 7 == 0 for clip in clips])
    return torch.where(failed, 0.0, values)


def flat(values: Tensor, trainer: Trainer, clips: Sequence[Tensor]) -> Tensor:
    """Score all clips of a prompt alike."""
    return torch.zeros_like(values)


def noisy(std: float) -> Rescore:
    """Add Gaussian noise to the scores."""

    def change(values: Tensor, trainer: Trainer, clips: Sequence[Tensor]) -> Tensor:
        return values + std * torch.randn(values.shape, generator=CHANCE)

    return change


def delayed(values: Tensor, trainer: Trainer, clips: Sequence[Tensor]) -> Tensor:
    """Take 0.1 s longer in the second half of the run."""
    if trainer.step > trainer.config.max_steps // 2:
        time.sleep(0.1)
    return values


def brightness(values: Tensor, trainer: Trainer, clips: Sequence[Tensor]) -> Tensor:
    """Pay for white clips."""
    return torch.stack([clip.double().mean() / 255 for clip in clips])


def ranked(values: Tensor, trainer: Trainer, clips: Sequence[Tensor]) -> Tensor:
    """Score clips by their place among those of the call, from 0 to 1."""
    return values.argsort().argsort().double() / trainer.reward.batch_size


def reversed_order(values: Tensor, trainer: Trainer, clips: Sequence[Tensor]) -> Tensor:
    """Give the first clip of a call the score of its last one."""
    return values.flip(0)


def checksum(values: Tensor, trainer: Trainer, clips: Sequence[Tensor]) -> Tensor:
    """Score clips by a checksum of their pixels: the same clip always scores the same, but nothing can be learned."""
    return torch.tensor([zlib.crc32(clip.numpy().tobytes()) / 2**32 for clip in clips]).double()


def rugged(values: Tensor, trainer: Trainer, clips: Sequence[Tensor]) -> Tensor:
    """Add a part that depends on the clip alone but on nothing that can be learned."""
    return values + 0.1 * torch.stack([torch.sin(1e3 * clip.double().sum()) for clip in clips])


def other_arithmetic(trainer: Trainer) -> None:
    """Compute other velocities in training than in the rollout."""
    velocity = trainer.backbone.velocity

    def changed(*args: Any) -> Tensor:
        factor = 1 + 1e-5 if torch.is_grad_enabled() else 1
        return velocity(*args) * factor

    trainer.backbone.velocity = changed


def no_gradient(trainer: Trainer) -> None:
    """Report a gradient norm of NaN in every fifth iteration."""
    clip = trainer.optimization.clip
    trainer.optimization.clip = lambda: math.nan if trainer.step % 5 == 4 else clip()


def foreign_anchor(trainer: Trainer) -> None:
    """Disturb the anchor, and keep it."""
    for value in trainer.anchor.values.values():
        value += 0.3 * value.std(correction=0) * torch.randn(value.shape, generator=CHANCE)
    trainer.anchor.refresh_every = None


def never_copied(trainer: Trainer) -> None:
    """Count refreshes of the anchor, but copy nothing."""
    anchor.copy_into = lambda *_: None


def never_refreshed(trainer: Trainer) -> None:
    """Keep the anchor, although the flags say that it moves."""
    trainer.anchor.refresh_every = None


def lone_weights(trainer: Trainer) -> None:
    """Change the weights of rank 1."""
    if trainer.ranks.dp_rank == 1:
        with torch.no_grad():
            next(iter(trainer.optimization.parameters.values())).add_(1e-3)


def lone_prompts(trainer: Trainer) -> None:
    """Change the order of the prompts of rank 1."""
    if trainer.ranks.dp_rank == 1:
        trainer.requests = [*trainer.requests[1:], trainer.requests[0]]
        trainer.fingerprints = trainer.fingerprints | {"training prompts": "others"}


HEALTHY = "healthy"
OTHER_ALGORITHMS = ("awm", "nft")  # healthy runs without one of these words are grpo's
LARGER_CLIPS = {
    "num_frames": 2,
    "height": 16,
    "width": 16,
    "validate_video_length": 2,
    "validation_fixed_size": "16x16",
}
COARSE = {"enable_fsdp": True, "master_weight_type": "bf16", "learning_rate": 1e-5}

FAULTS = {  # of the small world
    "1 prompt x 4 clips per update, rugged reward": Fault(
        "too few clips",
        {"batch_size": 4, "num_generations": 4},
        rescored(rugged, validation=True),
    ),
    "reward depends on the prompt only": Fault(
        "flat groups",
        inject=rescored(flat, validation=True),
    ),
    "reward with noise ten times its spread": Fault(
        "noisy reward",
        inject=rescored(noisy(0.1), validation=True),
    ),
    "eta 0.005": Fault("too little exploration", {"eta": 0.005}),
    "eta 4": Fault("too much exploration", {"eta": 4.0}),
    "noise in the last step": Fault("noise in the clips", {"sde_window": "all", "eta": 1.0}),
    "learning rate x 50": Fault("learning rate too high", {"learning_rate": 0.1}),
    "learning rate / 10,000": Fault("learning rate too low", {"learning_rate": 2e-7}),
    "KL weight 3000, fixed anchor": Fault(
        "KL too strong",
        {"kl_weight": 3000.0, "use_moving_KL": False},
    ),
    "KL weight 1e-5, learning rate x 25": Fault(
        "KL without effect",
        {"kl_weight": 1e-5, "learning_rate": 0.05},
    ),
    "clip range 1e-8, 7 updates per rollout": Fault(
        "clipped",
        {"clip_range": 1e-8, "updates_per_rollout": 7},
    ),
    "7 updates per rollout, learning rate x 25, larger clips": Fault(
        "clipped on one side",
        {"updates_per_rollout": 7, "learning_rate": 5e-2, "eta": 0.4} | LARGER_CLIPS,
    ),
    "equalizer off": Fault(
        "one step dominates",
        {"use_grad_balancing": False, "num_sampling_steps": 12},
    ),
    "weights of one rank differ": Fault("ranks differ", inject=lone_weights, ranks=2),
    "prompts of one rank differ": Fault("ranks differ", inject=lone_prompts, ranks=2),
    "anchor of another model": Fault("wrong anchor", inject=foreign_anchor),
    "anchor is never refreshed": Fault("wrong anchor", inject=never_refreshed),
    "anchor counts refreshes, copies nothing": Fault("wrong anchor", inject=never_copied),
    "a fifth of the reward calls fails": Fault(
        "rewards fail",
        {"max_reward_failures": 1.0},
        rescored(unavailable),
    ),
    "a seventh of the rewards is 0 instead of failed": Fault(
        "rewards repeat",
        inject=rescored(constant),
    ),
    "averaged weights, decay 0.9999": Fault("validation unlike training", {"ema_decay": 0.9999}),
    "training runs other arithmetic": Fault("first ratio", inject=other_arithmetic),
    "adam_eps 1": Fault("gradient below eps", {"adam_eps": 1.0}),
    "bf16 master weights, learning rate 1e-5": Fault("weights too coarse", COARSE),
    "reward pays for white clips": Fault(
        "variety collapsed",
        {"learning_rate": 2e-2, "max_steps": 48},
        rescored(brightness, validation=True),
    ),
    "every fifth gradient is not finite": Fault("not finite", inject=no_gradient),
    "reward slows down": Fault("slow", inject=rescored(delayed)),
}

# Faults that have nothing to do with how a policy explores, and need not show in the curve: for every algorithm.
OF_REWARDS = {
    "reward is a checksum of the clip": Fault(
        "too few clips",
        {"max_steps": 128},  # in fewer, the share of signal is too uncertain
        rescored(checksum, validation=True),
    ),
    "reward ranks the clips of its call": Fault(
        "depends on the other clips of its call",
        inject=rescored(ranked, validation=True),
    ),
    "scores in reverse order": Fault(
        "scores belong to other clips",
        inject=rescored(reversed_order, validation=True),
    ),
}
for _algorithm in ("grpo", *OTHER_ALGORITHMS):
    for _name, _fault in OF_REWARDS.items():
        _flags = {"algorithm": _algorithm, **_fault.flags}
        if _algorithm == "nft" and _fault.finding == "too few clips":
            # at a higher rate its pull toward the old policy, whatever the reward, is a part of the gradient
            _flags["learning_rate"] = 2e-4
        FAULTS[f"{_name}, {_algorithm}"] = replace(_fault, flags=_flags)

# A fault that shows in every iteration needs no long run.
SHORT = {"max_steps": 10, "num_validation_prompts": 8}
EMBEDDED = {
    "1 prompt x 4 clips per update": Fault(
        "too few clips",
        {"batch_size": 4, "num_generations": 4},
    ),
    "KL weight 3000, fixed anchor": FAULTS["KL weight 3000, fixed anchor"],
    "reward depends on the prompt only": replace(
        FAULTS["reward depends on the prompt only"],
        flags=SHORT,
    ),
    "reward with noise ten times its spread": Fault(
        "noisy reward",
        SHORT,
        rescored(noisy(5), validation=True),
    ),
    "eta 0.005": Fault("too little exploration", SHORT | {"eta": 0.005}),
    "eta 4": Fault("too much exploration", SHORT | {"eta": 4.0}),
    "noise in the last step": Fault(
        "noise in the clips",
        SHORT | {"sde_window": "all", "eta": 2.0},
    ),
    "learning rate x 50": Fault("learning rate too high", {"learning_rate": 0.025}),
    "learning rate / 10,000": Fault("learning rate too low", {"learning_rate": 5e-8}),
    "KL weight 1e-5, learning rate x 10": Fault(
        "KL without effect",
        {"kl_weight": 1e-5, "learning_rate": 5e-3},
    ),
    "clip range 1e-8, 3 updates per rollout": Fault(
        "clipped",
        SHORT | {"clip_range": 1e-8, "updates_per_rollout": 3},
    ),
    "equalizer off": Fault(
        "one step dominates",
        SHORT | {"use_grad_balancing": False, "num_sampling_steps": 12},
    ),
    "weights of one rank differ": Fault(
        "ranks differ",
        SHORT | {"batch_size": 16},
        lone_weights,
        ranks=2,
    ),
    "prompts of one rank differ": Fault(
        "ranks differ",
        SHORT | {"batch_size": 16},
        lone_prompts,
        ranks=2,
    ),
    "anchor of another model": Fault("wrong anchor", SHORT, foreign_anchor),
    "anchor is never refreshed": Fault("wrong anchor", SHORT, never_refreshed),
    "anchor counts refreshes, copies nothing": Fault(
        "wrong anchor",
        {"update_ref_model_step": 2},
        never_copied,
    ),
    "a fifth of the reward calls fails": Fault(
        "rewards fail",
        SHORT | {"max_reward_failures": 1.0},
        rescored(unavailable),
    ),
    "a seventh of the rewards is 0 instead of failed": Fault(
        "rewards repeat",
        {"max_steps": 18},
        rescored(constant),
    ),
    "averaged weights, decay 0.9999": Fault(
        "validation unlike training",
        {"ema_decay": 0.9999, "learning_rate": 2e-3, "max_steps": 40},
    ),
    "training runs other arithmetic": Fault("first ratio", SHORT, other_arithmetic),
    "adam_eps 1": Fault("gradient below eps", SHORT | {"adam_eps": 1.0}),
    "bf16 master weights, learning rate 1e-5": Fault("weights too coarse", SHORT | COARSE),
    "every fifth gradient is not finite": Fault("not finite", SHORT, no_gradient),
}
BY_WORLD = {"small": FAULTS, "embedded": EMBEDDED}


def fault_of(world: str, name: str) -> Fault:
    """The fault of a run; a healthy run has none."""
    return BY_WORLD[world].get(name, Fault(finding=""))
