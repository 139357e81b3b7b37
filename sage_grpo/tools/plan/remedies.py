"""What to change in a run that does not fit into memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from sage_grpo.config.fields import Config
from sage_grpo.tools.plan.memory import fits, peak
from sage_grpo.tools.plan.model import Plan
from sage_grpo.tools.plan.planner import plan_of


@dataclass(frozen=True)
class Remedy:
    """Another value of a flag, which saves memory, and what it costs."""

    flag: str
    value: Any | Callable[[Config], Any]
    cost: str

    def value_for(self, config: Config) -> Any:
        return self.value(config) if callable(self.value) else self.value


def twice_the_ranks(config: Config) -> int:
    return 2 * config.sp_size


def half_the_frames(config: Config) -> int:
    """The VAE takes 4 n + 1 frames."""
    return config.num_frames // 8 * 4 + 1


# Cheapest first
REMEDIES = (
    Remedy("micro_batch_size", 1, "hardly anything at full size"),
    Remedy("enable_fsdp", True, "weights are gathered from other GPUs"),
    Remedy("reduce_once", False, "gradients are summed over ranks in every backward"),
    Remedy("gather_for_rollout", False, "weights are gathered in every forward of a rollout"),
    Remedy("reference_mode_offload", True, "the anchor comes from host memory"),
    Remedy("enable_gradient_checkpointing", True, "blocks are computed again in every backward"),
    Remedy("checkpointing_fraction", 1.0, "blocks are computed again in every backward"),
    Remedy("keep_attention", False, "attention is computed again in every backward"),
    Remedy("dp_replicate", 1, "weights are gathered from other nodes"),
    Remedy("ema_decay", 0.0, "no averaged weights"),
    Remedy("sp_size", twice_the_ranks, "tokens travel between GPUs, fewer clips per iteration"),
    Remedy("use_lora", True, "an adapter is trained instead of all weights"),
    Remedy("num_frames", half_the_frames, "shorter clips"),
)


@dataclass(frozen=True)
class Change:
    """A remedy as it applies to a plan that already has the changes before it."""

    flag: str  # as on the command line, with its new value
    cost: str
    plan: Plan  # after the change


def remedies(plan: Plan, gpu_bytes: float) -> list[Change]:
    """A minimal set of changes that makes the plan fit; or all that help, if they are not enough."""
    chosen = without_needless(plan, enough_remedies(plan, gpu_bytes), gpu_bytes)
    changes = []
    for remedy in chosen:
        plan = applied(plan, remedy)
        value = getattr(plan.config, remedy.flag)
        changes.append(Change(flag=f"--{remedy.flag} {value}", cost=remedy.cost, plan=plan))
    return changes


def enough_remedies(plan: Plan, gpu_bytes: float) -> list[Remedy]:
    """Take remedies, cheapest first and each as often as it helps, until the plan fits."""
    chosen = []
    for remedy in REMEDIES:
        while not fits(plan, gpu_bytes):
            changed = applied(plan, remedy)
            if changed is plan:
                break
            plan = changed
            chosen.append(remedy)
    return chosen


def without_needless(plan: Plan, chosen: Sequence[Remedy], gpu_bytes: float) -> list[Remedy]:
    """Drop remedies, cheapest first, that later ones made unnecessary."""
    for remedy in REMEDIES:
        others = [other for other in chosen if other is not remedy]
        if fits(reduce(applied, others, plan), gpu_bytes):
            chosen = others
    return list(chosen)


def applied(plan: Plan, remedy: Remedy) -> Plan:
    """The plan after a remedy; the same object if that saves nothing or cannot run."""
    value = remedy.value_for(plan.config)
    try:
        changed = plan_of(
            replace(plan.config, **{remedy.flag: value}),
            plan.gpus,
            text_tokens=plan.text_tokens,
            gpu_model=plan.rates.gpu_model,
        )
    except ValueError:  # for example a layout that does not divide
        return plan
    _, peak_before = peak(plan)
    _, peak_after = peak(changed)
    return changed if peak_after < peak_before else plan
