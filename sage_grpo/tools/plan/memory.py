"""Memory of a run on one GPU, part by part: on a sequence-parallel leader, which also holds the reward.

Also the size of its checkpoints on disk, and what a node needs in host memory.
"""

from sage_grpo.config.fields import Config
from sage_grpo.models.backbone import Sampling
from sage_grpo.tools.plan.model import BYTES, GRADIENT_BYTES, Plan, TrainedParameters
from sage_grpo.train.build import rollout_sampling
from sage_grpo.train.validation import validation_sampling

# When memory may peak: the phases of an iteration, the optimizer step, when activations are freed, and the two phases
# of a validation, whose clips may be larger.
MOMENTS = (
    "rollout",
    "decode",
    "reward",
    "anchor",
    "update",
    "step",
    "validation",
    "validation_decode",
)
LATENT_BYTES = 4  # trajectories are kept in fp32
AVERAGE_BYTES = 4  # averages are kept in fp32, even of bf16 weights
NORMALIZER_BYTES = 4  # of attention, per token and head, in fp32


def bytes_by_moment(base: float, **more: float) -> dict[str, float]:
    """Bytes at every moment: `base`, plus `more` at some."""
    return {moment: base + more.get(moment, 0.0) for moment in MOMENTS}


def memory(plan: Plan) -> dict[str, dict[str, float]]:
    """Bytes by part and moment."""
    return {
        "weights": weights(plan),
        "gathered weights": gathered(plan),
        "gradients": gradients(plan),
        "optimizer": optimizer(plan),
        "anchor": anchor(plan),
        "EMA": averages(plan),
        "activations": activations(plan),
        "trajectories": trajectories(plan),
        "VAE": vae(plan),
        "reward": rewards(plan),
    }


def weights(plan: Plan) -> dict[str, float]:
    """This rank's shard: master weights; with LoRA, frozen weights in the compute dtype and the adapter."""
    c = plan.config
    master = BYTES[c.master_weight_type]
    all_here = plan.model.parameters * plan.model.experts / plan.shards - waiting_parameters(plan)
    if not c.use_lora:
        return bytes_by_moment(all_here * master)
    adapter_here = plan.trained.total / plan.shards
    return bytes_by_moment(all_here * BYTES[c.dtype] + adapter_here * master)


def waiting_parameters(plan: Plan) -> int:
    """Frozen parameters of the transformers that do not run, which wait in host memory unless they are sharded."""
    if plan.config.enable_fsdp or not plan.config.use_lora:
        return 0
    return (plan.model.experts - 1) * plan.model.layers * plan.model.block


def gathered(plan: Plan) -> dict[str, float]:
    """The current block, the next one, and everything outside blocks; or all weights in passes without gradients."""
    c = plan.config
    model = plan.model
    if not c.enable_fsdp:
        return bytes_by_moment(0.0)
    everything = model.parameters * model.experts * BYTES[c.dtype]
    in_blocks = model.layers * model.block * model.experts * BYTES[c.dtype]
    two_blocks = everything - in_blocks + 2 * model.block * BYTES[c.dtype]
    without_gradients = everything if c.gather_for_rollout else two_blocks
    return bytes_by_moment(
        0.0,
        rollout=without_gradients,
        anchor=without_gradients,
        validation=without_gradients,
        update=two_blocks,
    )


def gradients(plan: Plan) -> dict[str, float]:
    """This rank's shard, and gradients that still wait to be summed over ranks."""
    c = plan.config
    trained = plan.trained.total
    here = trained / plan.shards * BYTES[c.master_weight_type]
    if not c.enable_fsdp:
        # Several ranks sum their gradients as one flat copy.
        copies_in_step = 2 if plan.gpus > 1 else 1
        return bytes_by_moment(0.0, update=here, step=here * copies_in_step)

    # All of them until the only reduction, else those of two blocks in flight
    unreduced = trained if c.reduces_gradients_once else trained * 2 / plan.model.layers
    accumulated = here if c.gradient_accumulation_steps > 1 else 0.0
    return bytes_by_moment(
        accumulated,
        update=here - accumulated + unreduced * GRADIENT_BYTES,
        step=here - accumulated,
    )


def optimizer(plan: Plan) -> dict[str, float]:
    """Two moments per parameter, one for Muon's matrices. A step of AdamW copies one of them."""
    c = plan.config
    master = BYTES[c.master_weight_type]
    here = plan.trained.total / plan.shards
    by_muon = plan.trained.matrices / plan.shards if c.optimizer == "muon" else 0.0
    return bytes_by_moment((2 * here - by_muon) * master, step=(here - by_muon) * master)


def anchor(plan: Plan) -> dict[str, float]:
    """The anchor's weights, if they stay on the GPU; while they run, the policy's are kept beside them."""
    c = plan.config
    if c.trust_region.anchor is None or (c.reference_mode_offload and not c.use_lora):
        return bytes_by_moment(0.0)
    master = BYTES[c.master_weight_type]
    here = plan.trained.total / plan.shards
    stored = master if c.use_lora else BYTES[c.dtype]
    return bytes_by_moment(here * stored, anchor=here * master)


def averages(plan: Plan) -> dict[str, float]:
    """Averaged weights, and an old policy that lags behind; while either runs, the trained policy is kept beside it."""
    c = plan.config
    here = plan.trained.total / plan.shards
    copies = int(bool(c.ema_decay)) + int(c.samples_with_old_policy)
    policy = here * BYTES[c.master_weight_type]
    beside_average = policy if c.ema_decay else 0.0
    return bytes_by_moment(
        here * AVERAGE_BYTES * copies,
        rollout=policy if c.samples_with_old_policy else 0.0,
        validation=beside_average,
        validation_decode=beside_average,
    )


def activations(plan: Plan) -> dict[str, float]:
    """Each guidance branch keeps every block's input, or more; one block at a time is active."""
    c = plan.config
    rates = plan.rates
    sampled_tokens = plan.tokens * plan.micro_batch_size / c.sp_size
    sampled_unit = sampled_tokens * plan.model.width * BYTES[c.dtype]
    validated_unit = validation_tokens(plan) / c.sp_size * plan.model.width * BYTES[c.dtype]
    tokens = plan.tokens * c.trained_micro_batch / c.sp_size
    unit = tokens * plan.model.width * BYTES[c.dtype]
    exchange = rates.exchange_activations if c.sp_size > 1 else 0.0
    casts = adapters_cast(plan)
    copies = plan.by_mode(rates.adapter_training) if casts else 0.0

    # What one block keeps until its backward: its input, and with keep_attention also the output of attention
    recomputed_block = unit
    if c.keep_attention:
        recomputed_block = 2 * unit + tokens * plan.model.heads * NORMALIZER_BYTES
    saved_block = (rates.saved_activations + copies) * unit
    graph = plan.model.layers * (
        plan.recomputed * recomputed_block + (1 - plan.recomputed) * saved_block
    )

    per_unit = plan.by_mode(rates.forward_activations) + exchange
    if casts:
        per_unit += rates.adapter_forward
    training = unit * (plan.by_mode(rates.training_activations) + exchange + copies)
    return bytes_by_moment(
        0.0,
        rollout=sampled_unit * per_unit,
        anchor=unit * per_unit,
        update=plan.trained_branches * graph + training,
        validation=validated_unit * per_unit,
    )


def adapters_cast(plan: Plan) -> bool:
    """Whether adapters copy what they read to their own precision; FSDP casts adapters instead."""
    c = plan.config
    return c.use_lora and not c.enable_fsdp and BYTES[c.master_weight_type] > BYTES[c.dtype]


def validation_tokens(plan: Plan) -> int:
    """Tokens of a validation clip, which runs alone."""
    sampling = validation_sampling(plan.config)
    latents = plan.model.video_tokens(sampling.frames, sampling.height, sampling.width)
    return plan.model.sequence(latents, plan.text_tokens)


def trajectories(plan: Plan) -> dict[str, float]:
    """Latents of all clips until the reward, and of the trained ones until the update; both while they are chosen."""
    c = plan.config
    anchored = int(c.trust_region.anchor is not None)
    if plan.algorithm.explores:
        # W steps: W + 1 states and the final latents; a velocity of the policy and of the anchor at each step
        sampled_clip = 2 * plan.windows.size + 2
        trained_clip = sampled_clip + anchored * plan.windows.size
    else:
        # a state, a target and the same velocities at each trained step; the final latents
        sampled_clip = 1
        trained_clip = (3 + anchored) * plan.trained_steps + 1
    latent = plan.latent_positions * plan.model.channels * LATENT_BYTES
    trained = trained_clip * latent * plan.trained_clips
    if plan.trained_clips == c.batch_size:
        return bytes_by_moment(trained)
    sampled = sampled_clip * latent * c.batch_size
    return bytes_by_moment(
        0.0,
        rollout=sampled,
        decode=sampled,
        reward=sampled,
        anchor=sampled + trained,
        update=trained,
    )


def vae(plan: Plan) -> dict[str, float]:
    """Weights, and the memory for decoding a clip."""
    c = plan.config
    return bytes_by_moment(
        plan.model.vae * BYTES[c.dtype],
        decode=decoding_bytes(plan, rollout_sampling(c)),
        validation_decode=decoding_bytes(plan, validation_sampling(c)),
    )


def decoding_bytes(plan: Plan, sampling: Sampling) -> float:
    """Bytes inside the VAE while it decodes one clip, tiled if that exceeds `decode_gb`."""
    positions = plan.model.video_tokens(sampling.frames, sampling.height, sampling.width)
    untiled = positions * plan.by_mode(plan.model.untiled)
    if untiled > plan.config.decode_gb * 1e9:
        return plan.model.tiled * sampling.frames
    return untiled


def rewards(plan: Plan) -> dict[str, float]:
    """Weights of all rewards; they score one after another."""
    loaded = sum(reward.weight_bytes for reward in plan.rewards)
    scoring = max((reward.forward_bytes for reward in plan.rewards), default=0.0)
    return bytes_by_moment(loaded, reward=scoring)


def peak(plan: Plan) -> tuple[str, float]:
    """The moment of peak memory, and its bytes."""
    parts = memory(plan).values()
    totals = {moment: sum(part[moment] for part in parts) for moment in MOMENTS}
    return max(totals.items(), key=lambda item: item[1])


def fits(plan: Plan, gpu_bytes: float) -> bool:
    _, peak_bytes = peak(plan)
    return peak_bytes + plan.rates.reserve <= gpu_bytes


def checkpoint_bytes(config: Config, trained: TrainedParameters) -> int:
    """One checkpoint: weights, optimizer state, anchor, averaged weights; an adapter also in diffusers' layout."""
    master = BYTES[config.master_weight_type]
    copies = 3  # the weights and two moments
    copies += int(config.use_lora)
    averages = int(bool(config.ema_decay)) + int(config.samples_with_old_policy)
    per_parameter = copies * master + averages * AVERAGE_BYTES
    if config.trust_region.anchor is not None:
        per_parameter += master if config.use_lora else BYTES[config.dtype]
    with_one_moment = trained.matrices if config.optimizer == "muon" else 0
    return trained.total * per_parameter - with_one_moment * master


def export_bytes(plan: Plan) -> int:
    """All weights in diffusers' layout, which some checkpoints hold in addition; none do with LoRA."""
    if plan.config.use_lora:
        return 0
    return plan.model.parameters * plan.model.experts * BYTES[plan.config.master_weight_type]


def disk_bytes(plan: Plan) -> int:
    """The most that a run keeps on disk: the kept checkpoints, the next one, and the exports in them."""
    checkpoints = plan.config.keep_checkpoints + 1
    exports = checkpoints if plan.config.export_interval else 1
    return checkpoints * checkpoint_bytes(plan.config, plan.trained) + exports * export_bytes(plan)


def snapshot_bytes(plan: Plan) -> float:
    """Host memory of an asynchronous save: what the ranks of the fullest node write."""
    if not plan.config.async_save:
        return 0.0
    share = min(1.0, plan.rates.gpus_per_node / plan.shards)
    return checkpoint_bytes(plan.config, plan.trained) * share


def offloaded_bytes(plan: Plan) -> float:
    """Host memory of one rank for an offloaded anchor, and for the trained weights that wait there while it runs."""
    c = plan.config
    if c.trust_region.anchor is None or not c.reference_mode_offload or c.use_lora:
        return 0.0
    here = plan.trained.total / plan.shards
    return here * (BYTES[c.dtype] + BYTES[c.master_weight_type])


def swapped_bytes(plan: Plan) -> float:
    """Host memory of one rank for transformers that take turns on its GPU: the blocks of all of them."""
    if not waiting_parameters(plan):
        return 0.0
    model = plan.model
    return model.experts * model.layers * model.block * BYTES[plan.config.dtype]


def host_bytes(plan: Plan) -> float:
    """Host memory of the fullest node, besides the processes themselves."""
    ranks = min(plan.gpus, plan.rates.gpus_per_node)
    return snapshot_bytes(plan) + ranks * (offloaded_bytes(plan) + swapped_bytes(plan))
