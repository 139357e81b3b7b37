"""What to change in a run that does not fit into memory."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from sage_grpo.config.fields import Config
from sage_grpo.tools.plan.memory import fits, peak
from sage_grpo.tools.plan.model import Plan
from sage_grpo.tools.plan.planner import plan_of

Flags = Mapping[str, Any]

# Smaller clips teach a video model little.
MIN_FRAMES = 17
MIN_SIDE = 240  # pixels
SIDE_STEP = 32  # pixels; every backbone accepts multiples of it
MAX_GPUS = 64


@dataclass(frozen=True)
class Remedy:
    """Other values of flags, which save memory, and what that costs. `flags` may depend on the current values."""

    flags: Flags | Callable[[Config], Flags]
    cost: str

    def flags_for(self, config: Config) -> Flags:
        """Empty if the remedy does not apply."""
        return self.flags(config) if callable(self.flags) else self.flags


def sharded_rollout(config: Config) -> Flags:
    """Ranks whose weights are not gathered must run equally many forwards, so all groups share a window."""
    flags: dict[str, Any] = {"gather_for_rollout": False}
    window = config.window_form
    if window.per_group and not window.is_whole:
        flags["sde_window"] = config.sde_window.replace(window.kind, f"{window.kind}_iteration", 1)
    return flags


def validated_as_trained(config: Config) -> Flags:
    return {
        "validate_video_length": config.num_frames,
        "validation_fixed_size": f"{config.height}x{config.width}",
    }


def twice_the_ranks(config: Config) -> Flags:
    return {"sp_size": 2 * config.sp_size}


def half_the_frames(config: Config) -> Flags:
    """Half as many frames, 4 n + 1 as the VAE needs."""
    frames = config.num_frames // 8 * 4 + 1
    return {"num_frames": frames} if frames >= MIN_FRAMES else {}


def smaller_frames(config: Config) -> Flags:
    """Three quarters of each side, and validation clips of the same size."""
    height = config.height * 3 // 4 // SIDE_STEP * SIDE_STEP
    width = config.width * 3 // 4 // SIDE_STEP * SIDE_STEP
    return {"height": height, "width": width} if min(height, width) >= MIN_SIDE else {}


# Cheapest first
REMEDIES = (
    Remedy({"micro_batch_size": 1}, "hardly anything at full size"),
    Remedy({"decode_gb": 0.0}, "clips are decoded in tiles"),
    Remedy({"enable_fsdp": True}, "weights are gathered from other GPUs"),
    Remedy({"reduce_once": False}, "gradients are summed over ranks in every backward"),
    Remedy(sharded_rollout, "weights are gathered in every forward of a rollout"),
    Remedy({"reference_mode_offload": True}, "the anchor comes from host memory"),
    Remedy({"enable_gradient_checkpointing": True}, "blocks are computed again in every backward"),
    Remedy({"checkpointing_fraction": 1.0}, "blocks are computed again in every backward"),
    Remedy({"keep_attention": False}, "attention is computed again in every backward"),
    Remedy({"dp_replicate": 1}, "weights are gathered from other nodes"),
    Remedy({"ema_decay": 0.0}, "no averaged weights"),
    Remedy(validated_as_trained, "validation clips are as small as those of training"),
    Remedy(twice_the_ranks, "tokens travel between GPUs, fewer clips per iteration"),
    Remedy({"use_lora": True}, "an adapter is trained instead of all weights"),
    Remedy(
        {"reward_model": ("remote",), "remote_reward_url": "http://HOST:PORT"},
        "the reward runs on another GPU (docs/rewards.md)",
    ),
    Remedy(half_the_frames, "shorter clips"),
    Remedy(smaller_frames, "smaller clips"),
)


@dataclass(frozen=True)
class Change:
    """A remedy as it applies to a plan that already has the changes before it."""

    flags: Flags  # with their new values
    cost: str
    plan: Plan  # after the change

    @property
    def words(self) -> str:
        """The flags as on the command line."""
        return " ".join(f"--{name} {as_typed(value)}" for name, value in self.flags.items())


def remedies(plan: Plan, gpu_bytes: float) -> list[Change]:
    """A minimal set of changes that makes the plan fit, with more GPUs if flags are not enough; empty if none does."""
    if fits(plan, gpu_bytes):
        return []
    for start in with_more_gpus(plan):
        chosen = enough_remedies(start, gpu_bytes)
        if not fits(reduce(applied, chosen, start), gpu_bytes):
            continue
        changes = [] if start.gpus == plan.gpus else [more_gpus(start)]
        for remedy in without_needless(start, chosen, gpu_bytes):
            changes.append(change_by(changes[-1].plan if changes else start, remedy))
        return changes
    return []


def with_more_gpus(plan: Plan) -> list[Plan]:
    """The plan, and the same run sharded over 2, 4, 8, ... times as many GPUs; layouts that cannot run are left out."""
    plans = [plan]
    gpus = 2 * plan.gpus
    while gpus <= MAX_GPUS:
        with suppress(ValueError):  # for example a batch that does not divide
            plans.append(changed(plan, {"enable_fsdp": True, "gpus": gpus}))
        gpus *= 2
    return plans


def more_gpus(plan: Plan) -> Change:
    flags = {"gpus": plan.gpus, "enable_fsdp": True}
    return Change(flags, cost="fewer cannot run it; weights are sharded", plan=plan)


def change_by(plan: Plan, remedy: Remedy) -> Change:
    flags = remedy.flags_for(plan.config)
    return Change(flags, cost=remedy.cost, plan=applied(plan, remedy))


def all_words(changes: Sequence[Change]) -> str:
    """The flags of all changes as on the command line, each once, with its last value."""
    flags: dict[str, Any] = {}
    for change in changes:
        flags.update(change.flags)
    return Change(flags, cost="", plan=changes[-1].plan).words


def as_typed(value: Any) -> str:
    """A value as on the command line."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def enough_remedies(plan: Plan, gpu_bytes: float) -> list[Remedy]:
    """Apply remedies, cheapest first and each as often as it helps, until the plan fits or none helps.

    A remedy may help only after another one has lowered a higher peak, so the list is gone through repeatedly.
    """
    chosen: list[Remedy] = []
    while not fits(plan, gpu_bytes):
        helped = False
        for remedy in REMEDIES:
            after = applied(plan, remedy)
            if after is not plan:
                plan = after
                chosen.append(remedy)
                helped = True
                break
        if not helped:
            break
    return chosen


def without_needless(plan: Plan, chosen: Sequence[Remedy], gpu_bytes: float) -> list[Remedy]:
    """Drop remedies, the most expensive first, that the others make unnecessary."""
    for remedy in reversed(REMEDIES):
        if remedy not in chosen:
            continue
        others = [other for other in chosen if other is not remedy]
        if fits(reduce(applied, others, plan), gpu_bytes):
            chosen = others
    return list(chosen)


def applied(plan: Plan, remedy: Remedy) -> Plan:
    """The plan after a remedy; the same object if that saves nothing or cannot run."""
    flags = remedy.flags_for(plan.config)
    if all(getattr(plan.config, name) == value for name, value in flags.items()):
        return plan
    try:
        after = changed(plan, flags)
    except ValueError:  # for example a layout that does not divide
        return plan
    _, peak_before = peak(plan)
    _, peak_after = peak(after)
    return after if peak_after < peak_before else plan


def changed(plan: Plan, flags: Flags) -> Plan:
    """The plan with other values of flags of post_train.py; `gpus` is also the number of processes."""
    return plan_of(
        replace(plan.config, **flags),
        flags.get("gpus", plan.gpus),
        text_tokens=plan.text_tokens,
        gpu_model=plan.rates.gpu_model,
    )
