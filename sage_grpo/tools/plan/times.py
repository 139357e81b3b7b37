"""Time and traffic of an iteration: the counts of a `Plan` over the measured rates."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from sage_grpo.models.cost import BACKWARD_OF_ATTENTION
from sage_grpo.tools.plan.memory import swapped_bytes
from sage_grpo.tools.plan.model import BYTES, GRADIENT_BYTES, Plan
from sage_grpo.train.validation import validation_sampling


class ForwardParts(NamedTuple):
    """Seconds that the forward of one clip spends in attention, in linear layers and in everything else."""

    attention: float
    linear: float
    rest: float


def forward_parts(plan: Plan) -> ForwardParts:
    flops = plan.model.forward(plan.latent_positions, plan.text_tokens)
    return ForwardParts(
        attention=flops.attention / plan.rates.attention,
        linear=flops.linear / plan.rates.linear,
        rest=plan.tokens * plan.model.layers * plan.by_mode(plan.rates.rest),
    )


def forward_time(plan: Plan, clips: int | None = None) -> float:
    """Seconds for the forward of `clips`, by default a micro-batch of the rollout, without waiting for other ranks."""
    clips = plan.micro_batch_size if clips is None else clips
    return sum(forward_parts(plan)) * clips / plan.config.sp_size


def backward_time(plan: Plan) -> float:
    """Seconds for the backward of a trained micro-batch, with recomputation, without waiting for other ranks."""
    c = plan.config
    rates = plan.rates
    forward = forward_parts(plan)
    recomputed_attention = 0.0 if c.keep_attention else forward.attention
    recomputation = plan.recomputed * (forward.linear + forward.rest + recomputed_attention)

    flops = plan.model.forward(plan.latent_positions, plan.text_tokens)
    attention = flops.attention * BACKWARD_OF_ATTENTION / rates.attention_backward
    # Gradients of inputs and of weights each cost as much as a forward; frozen weights have none.
    linear = forward.linear * (1 if c.use_lora else 2)
    rest = plan.tokens * plan.model.layers * plan.by_mode(rates.rest_backward)

    seconds = attention + recomputation + (linear + rest)
    return seconds * c.trained_micro_batch / c.sp_size


@dataclass(frozen=True)
class Traffic:
    """What one GPU receives, in bytes or in seconds."""

    gather: float  # all weights, for one pass of a sharded model
    exchange: float  # tokens of one forward in the rollout, between sequence-parallel ranks
    reduce: float  # gradients of one reduction, within a group of shards
    replicas: float  # gradients of one reduction, between replicas


def traffic(plan: Plan) -> Traffic:
    """Bytes into one GPU."""
    c = plan.config
    model = plan.model
    shards = plan.shards
    replicas = plan.gpus // shards
    ranks = c.sp_size
    activation = plan.tokens * plan.micro_batch_size / ranks * model.width * BYTES[c.dtype]
    gradients = plan.trained.total * GRADIENT_BYTES
    return Traffic(
        gather=model.parameters * BYTES[c.dtype] * (shards - 1) / shards,
        # query, key, value and output of each block
        exchange=4 * activation * model.layers * (ranks - 1) / ranks,
        reduce=gradients * (shards - 1) / shards,
        replicas=gradients / shards * 2 * (replicas - 1) / replicas,
    )


def waits(plan: Plan) -> Traffic:
    """Seconds for the traffic. A ring uses the network of all GPUs in a node, an exchange only each GPU's own."""
    volume = traffic(plan)
    rates = plan.rates
    node = rates.gpus_per_node
    ring = rates.nvlink if plan.shards <= node else min(rates.nvlink, rates.nic * node)
    between_ranks = rates.nvlink if plan.config.sp_size <= node else rates.nic
    between_replicas = rates.nvlink if plan.gpus <= node else rates.nic
    return Traffic(
        gather=volume.gather / ring,
        exchange=volume.exchange / between_ranks,
        reduce=volume.reduce / ring,
        replicas=volume.replicas / between_replicas,
    )


def times(plan: Plan, overlap: bool = True) -> dict[str, float]:
    """Seconds per phase of an iteration, after warm-up, averaged over iterations.

    overlap: weights and gradients travel while blocks compute, so only the excess counts. Token exchanges always count
    in full.
    """
    c = plan.config
    rates = plan.rates
    wait = waits(plan)
    sampling = forward_time(plan) * rates.trainer_overhead.forward
    forward = forward_time(plan, c.trained_micro_batch) * rates.trainer_overhead.forward
    backward = backward_time(plan) * rates.trainer_overhead.backward

    # Seconds of computation that can hide communication
    overlaps = overlap and c.enable_fsdp
    hidden_by_sampling = sampling if overlaps else 0.0
    hidden_by_forward = forward if overlaps else 0.0
    hidden_by_backward = backward if overlaps else 0.0
    sampling_gather = max(0.0, wait.gather - hidden_by_sampling)
    forward_gather = max(0.0, wait.gather - hidden_by_forward)
    backward_gather = max(0.0, wait.gather - hidden_by_backward)
    left_for_reduction = max(0.0, hidden_by_backward - wait.gather)
    reduction = max(0.0, wait.reduce + wait.replicas - left_for_reduction)

    sampling += wait.exchange
    trained_exchange = plan.trained_share * wait.exchange
    forward += trained_exchange
    backward_exchange = (1 + plan.recomputed) * trained_exchange
    trained_here = plan.trained.total / plan.shards

    passes = plan.training_passes
    optimizer_steps = c.updates_per_rollout / c.gradient_accumulation_steps
    update = passes * (forward + forward_gather + backward + backward_gather + backward_exchange)
    update += plan.reductions * reduction + optimizer_steps * trained_here / rates.optimizer

    anchor = passes * forward + plan.anchor_gathers * forward_gather
    if c.reference_mode_offload and not c.use_lora:
        # Parameters move to the host, the anchor comes in, and the parameters come back.
        anchor += trained_here * (2 * BYTES[c.master_weight_type] + BYTES[c.dtype]) / rates.host

    # Transformers that take turns on the GPU change in the middle of a clip, or of a window, and for the next one.
    change = change_time(plan)
    window_changes = 2 * plan.crossing * plan.trained_micro_batches * change
    anchor += window_changes
    update += window_changes

    old_policy = plan.old_policy_passes * forward + plan.old_policy_gathers * forward_gather
    if plan.old_policy_passes:
        old_policy += window_changes

    return {
        "rollout": plan.rollout_passes * sampling
        + plan.rollout_gathers * sampling_gather
        + 2 * plan.micro_batches * change,
        "decode": math.ceil(c.batch_size / c.sp_size) * plan.decode_seconds,
        "reward": c.batch_size * sum(reward.seconds for reward in plan.rewards),
        "anchor": old_policy + plan.anchor_fraction * anchor,
        "update": update,
    }


def change_time(plan: Plan) -> float:
    """Seconds that a forward waits for a transformer from host memory: for one block, or for what it cannot hide.

    0 if transformers do not take turns on the GPU.
    """
    if not swapped_bytes(plan):
        return 0.0
    model = plan.model
    copy = model.layers * model.block * BYTES[plan.config.dtype] / plan.rates.host
    return max(copy - forward_time(plan), copy / model.layers)


def waiting_time(plan: Plan) -> float:
    """Seconds per iteration that an average rank waits in the rollout for the rank with the costliest window."""
    forward = forward_time(plan) * plan.rates.trainer_overhead.forward + waits(plan).exchange
    return (plan.rollout_passes - plan.own_rollout_passes) * forward


def clips_per_gpu_hour(plan: Plan) -> float:
    return 3600 * plan.clips / plan.gpus / sum(times(plan).values())


def validation_time(plan: Plan, clips: int) -> float:
    """Seconds of a validation, which samples one clip at a time on each data-parallel rank."""
    c = plan.config
    sampling = validation_sampling(c)
    one_clip = replace(
        plan,
        config=replace(
            c,
            num_frames=sampling.frames,
            height=sampling.height,
            width=sampling.width,
            micro_batch_size=1,
        ),
    )
    wait = waits(one_clip)
    step = plan.branches * (max(forward_time(one_clip), wait.gather) + wait.exchange)
    scoring = sum(reward.seconds for reward in plan.rewards)
    seconds = sampling.num_steps * step + one_clip.decode_seconds + scoring
    seconds += 2 * change_time(one_clip)
    clips_per_rank = math.ceil(clips * c.sp_size / plan.gpus)
    return clips_per_rank * seconds


def run_time(plan: Plan, validation_clips: int) -> float:
    """Seconds of a whole run, with its validations."""
    c = plan.config
    validations = int(c.validate_at_step0)
    validations += math.ceil(c.max_steps / (c.validation_interval or c.max_steps or 1))
    iterations = c.max_steps * sum(times(plan).values())
    return iterations + validations * validation_time(plan, validation_clips)


def volumes(plan: Plan) -> dict[str, float]:
    """Bytes into one GPU per iteration."""
    volume = traffic(plan)
    passes = plan.training_passes
    anchor_passes = passes * plan.anchor_fraction
    gathers = plan.rollout_gathers + 2 * passes
    gathers += plan.old_policy_gathers + plan.anchor_gathers * plan.anchor_fraction
    trained_exchanges = plan.old_policy_passes + anchor_passes + passes * (2 + plan.recomputed)
    exchanges = plan.own_rollout_passes + plan.trained_share * trained_exchanges
    return {
        "weights": volume.gather * gathers,
        "gradients": (volume.reduce + volume.replicas) * plan.reductions,
        "tokens": volume.exchange * exchanges,
    }
