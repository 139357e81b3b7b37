"""Cost of an iteration: work and traffic from configuration, model and layout; times from measured rates.

`Calibration` holds everything measured or assumed, including for `plan_memory.py`: recalibrating changes its file
and nothing else.
"""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sage_grpo.config.fields import Config
from sage_grpo.config.rules import check
from sage_grpo.models.cost import BACKWARD_OF_ATTENTION, Architecture
from sage_grpo.parallel.ranks import check_layout
from sage_grpo.rewards.registry import ALIASES
from sage_grpo.train.rollout import num_trained, parse_windows
from sage_grpo.train.update import ALGORITHMS, sampler_of
from sage_grpo.train.validation import validation_sampling

BYTES = {"fp32": 4, "bf16": 2}
FIGURES = tomllib.loads(
    Path(__file__).parents[1].joinpath("templates", "calibration.toml").read_text()
)
CARDS = FIGURES.pop("cards")


class Calibration(SimpleNamespace):
    """The figures of templates/calibration.toml, each with its source there; tests give others.

    Those of another card are scaled by what bounds each: its arithmetic, its memory, or its links.
    """

    def __init__(self, card: str = "h200", **others: Any) -> None:
        work, memory, links = (
            mine / measured for mine, measured in zip(CARDS[card], CARDS["h200"], strict=True)
        )
        faster = {
            "attention": work,
            "attention_backward": work,
            "linear": work,
            "optimizer": memory,
            "nvlink": links,
        }
        scaled = {name: FIGURES[name] * factor for name, factor in faster.items()}
        scaled["decode"] = FIGURES["decode"] / memory
        pairs = ("rest", "rest_backward", "decode_untiled")
        scaled |= {name: [part / memory for part in FIGURES[name]] for name in pairs}
        super().__init__(**FIGURES | scaled | others, card=card)


@dataclass(frozen=True)
class Trained:
    """How many parameters a run trains."""

    total: int  # the adapter's with LoRA
    matrices: int  # of these, in 2-D block weights


@dataclass(eq=False)
class Plan:
    """A resolved configuration on a number of GPUs. Building one rejects layouts that do not divide."""

    config: Config
    model: Architecture
    trained: Trained
    gpus: int
    text_tokens: int = 150
    rates: Calibration = field(default_factory=Calibration)

    def __post_init__(self) -> None:
        c, heads, r = self.config, self.model.heads, self.rates
        check_layout(self.gpus, c.sp_size, c.enable_fsdp, c.dp_replicate)
        if heads % c.sp_size:
            raise ValueError(f"sp_size is {c.sp_size}; it must divide the model's {heads} heads")
        check(c, self.gpus)
        self.clips = c.batch_size * self.gpus // c.sp_size  # per iteration, over all ranks
        self.shards = self.gpus // c.dp_replicate if c.enable_fsdp else 1
        self.latents = self.model.video_tokens(
            c.num_frames, c.height, c.width
        )  # positions of a clip
        self.tokens = self.model.sequence(self.latents, self.text_tokens)
        tiled = self.latents * self.variant(self.model.untiled) > c.decode_gb * 1e9
        self.decode = self.latents * (
            r.decode if tiled else self.variant(r.decode_untiled)
        )  # seconds of a clip
        names = (ALIASES.get(name, name) for name in c.reward_model)
        self.rewards = [
            r.rewards[name] for name in names if name in r.rewards
        ]  # those that the calibration knows
        self.recomputed = c.checkpointing_fraction if c.enable_gradient_checkpointing else 0.0
        self.micro_batch = c.micro_batch_size or min(c.batch_size, c.num_generations)
        self.slices = c.batch_size // self.micro_batch  # micro-batches per rank and iteration
        self.algorithm = ALGORITHMS[c.algorithm]
        self.windows = parse_windows(c.sde_window, sampler_of(c).stochastic, c.seed)
        self.trained_steps = num_trained(self.windows.size, c.timestep_fraction)
        self.branches = 1 if math.isclose(c.guidance_scale, 1.0) else 2
        self.trained_branches = self.branches if self.algorithm.explores else 1
        # forward-backward passes per update; the anchor, if run, has as many forwards
        self.training_passes = self.slices * self.trained_branches * self.trained_steps
        self.rollout_gathers = self.slices if c.gather_for_rollout else self.rollout_passes

    @property
    def ode_steps(self) -> tuple[float, float]:
        """Denoising steps before and after the window, averaged over its places."""
        c, w = self.config, self.windows
        before = [w.first + place for place in range(w.places)]
        after = [c.num_sampling_steps - start - w.size for start in before]
        after = [min(left, c.tail_steps) for left in after] if c.tail_steps else after
        return sum(before) / w.places, sum(after) / w.places

    @property
    def anchored(self) -> float:
        """Fraction of iterations that run the anchor: it is skipped while it equals the policy."""
        c = self.config
        if c.trust_region.anchor != "moving" or c.lags:
            return float(c.trust_region.anchor is not None)
        return 1 - 1 / math.ceil(c.update_ref_model_step / c.updates_per_rollout)

    def variant(self, pair: Sequence[float]) -> float:
        """The value of a (compiled, eager) calibration pair that applies to the run."""
        return pair[not self.config.compile]

    @property
    def rollout_passes(self) -> float:
        """Forwards of a micro-batch per iteration; a way to the window that a group shares counts as one clip's."""
        c, (before, after) = self.config, self.ode_steps
        if not self.algorithm.explores:  # the ODE, and the old policy at the trained states
            steps = min(c.tail_steps or c.num_sampling_steps, c.num_sampling_steps)
            return self.slices * (self.branches * steps + self.trained_steps)
        ways = (
            math.ceil(c.batch_size / c.num_generations) / self.micro_batch
            if c.same_init_noise
            else self.slices
        )
        return self.branches * (ways * before + self.slices * (self.windows.size + after))

    @property
    def reductions(self) -> float:
        """Passes per update that sum gradients over ranks."""
        c = self.config
        if not c.enable_fsdp:
            return c.updates_per_rollout / c.gradient_accumulation_steps
        return (
            c.updates_per_rollout * self.trained_branches
            if c.reduces_once
            else self.training_passes
        )

    @property
    def clips_per_gpu_hour(self) -> float:
        return 3600 * self.clips / self.gpus / sum(times(self).values())


def compute_time(plan: Plan, backward: bool = False) -> float:
    """Seconds for one pass of a micro-batch on one rank, without waiting for others."""
    c, r, layers = plan.config, plan.rates, plan.model.layers
    work = plan.model.forward(plan.latents, plan.text_tokens)
    attention, linear = work.attention / r.attention, work.linear / r.linear
    rest = plan.tokens * layers * plan.variant(r.rest)
    seconds = attention + linear + rest
    if backward:
        again = plan.recomputed * (linear + rest + (0 if c.keep_attention else attention))
        seconds = work.attention * BACKWARD_OF_ATTENTION / r.attention_backward + again
        seconds += linear * (1 if c.use_lora else 2) + plan.tokens * layers * plan.variant(
            r.rest_backward
        )
    return seconds * plan.micro_batch / c.sp_size


def traffic(plan: Plan) -> dict[str, float]:
    """Bytes into one GPU: weights and tokens per forward, gradients per reduction and then between replicas."""
    c, m, shards, sp = plan.config, plan.model, plan.shards, plan.config.sp_size
    replicas, unit = (
        plan.gpus // shards,
        plan.tokens * plan.micro_batch / sp * m.width * BYTES[c.dtype],
    )
    return {
        "gather": m.parameters * BYTES[c.dtype] * (shards - 1) / shards,
        "exchange": 4 * unit * m.layers * (sp - 1) / sp,  # query, key, value; the output
        "reduce": plan.trained.total * 4 * (shards - 1) / shards,
        "replicas": plan.trained.total * 4 / shards * 2 * (replicas - 1) / replicas,
    }


def waits(plan: Plan) -> dict[str, float]:
    """Seconds for the traffic. A ring uses the network of all GPUs in a node, an exchange only each GPU's own."""
    r, node = plan.rates, plan.rates.gpus_per_node
    ring = r.nvlink if plan.shards <= node else min(r.nvlink, r.nic * node)
    speeds = {
        "gather": ring,
        "reduce": ring,
        "exchange": r.nvlink if plan.config.sp_size <= node else r.nic,
        "replicas": r.nvlink if plan.gpus <= node else r.nic,
    }
    return {name: volume / speeds[name] for name, volume in traffic(plan).items()}


def times(plan: Plan, overlap: bool = True) -> dict[str, float]:
    """Seconds per phase, after warm-up, averaged over iterations.

    overlap: weights and gradients travel while blocks compute, so only the excess counts. Token exchanges always count
    in full.
    """
    c, r, wait = plan.config, plan.rates, waits(plan)
    forward, backward = (compute_time(plan, part) * r.in_trainer[part] for part in (False, True))
    passes = plan.training_passes
    during, during_backward = (forward, backward) if overlap and c.enable_fsdp else (0.0, 0.0)
    gather, regather = max(0.0, wait["gather"] - during), max(0.0, wait["gather"] - during_backward)
    reduction, steps = (
        wait["reduce"] + wait["replicas"],
        c.updates_per_rollout / c.gradient_accumulation_steps,
    )
    forward += wait["exchange"]
    update = passes * (
        forward + gather + backward + regather + (1 + plan.recomputed) * wait["exchange"]
    )
    left = max(0.0, during_backward - wait["gather"])
    update += (
        plan.reductions * max(0.0, reduction - left)
        + steps * plan.trained.total / plan.shards / r.optimizer
    )
    anchor = passes * (forward + gather)
    if (
        c.reference_mode_offload and not c.use_lora
    ):  # parameters out, the anchor in, parameters back
        anchor += (
            plan.trained.total
            / plan.shards
            * (2 * BYTES[c.master_weight_type] + BYTES[c.dtype])
            / r.host
        )
    return {
        "rollout": plan.rollout_passes * forward + plan.rollout_gathers * gather,
        "decode": math.ceil(c.batch_size / c.sp_size) * plan.decode,
        "reward": c.batch_size * sum(seconds for *_, seconds in plan.rewards),
        "anchor": plan.anchored * anchor,
        "update": update,
    }


def validation_time(plan: Plan, clips: int) -> float:
    """Seconds of a validation, which samples one clip at a time on each data-parallel rank."""
    c, own = plan.config, validation_sampling(plan.config)
    size = {"num_frames": own.frames, "height": own.height, "width": own.width}
    one = replace(plan, config=replace(c, **size, micro_batch_size=1))
    forward, wait = compute_time(one), waits(one)
    step = plan.branches * (max(forward, wait["gather"]) + wait["exchange"])
    seconds = own.num_steps * step + one.decode + sum(s for *_, s in plan.rewards)
    return math.ceil(clips * c.sp_size / plan.gpus) * seconds


def volumes(plan: Plan) -> dict[str, float]:
    """Bytes into one GPU per iteration."""
    t, passes = traffic(plan), plan.training_passes
    return {
        "weights": t["gather"] * (plan.rollout_gathers + passes * (2 + plan.anchored)),
        "gradients": (t["reduce"] + t["replicas"]) * plan.reductions,
        "tokens": t["exchange"]
        * (plan.rollout_passes + passes * (2 + plan.recomputed + plan.anchored)),
    }
