"""Memory of a run on one GPU, part by part: on a sequence-parallel leader, which also holds the reward.

And the size of its checkpoints, on disk and in host memory.
"""

from sage_grpo.config.fields import Config
from sage_grpo.models.backbone import Sampling
from sage_grpo.tools.plan.model import BYTES, Plan, Trained
from sage_grpo.train.build import rollout_sampling
from sage_grpo.train.validation import validation_sampling

# When memory may peak: the phases of an iteration, and the optimizer step, when activations are freed.
MOMENTS = ("rollout", "decode", "reward", "anchor", "update", "step")


def at(base: float, **more: float) -> dict[str, float]:
    """`base` at every moment, plus `more` at some."""
    return {moment: base + more.get(moment, 0.0) for moment in MOMENTS}


def memory(plan: Plan) -> dict[str, dict[str, float]]:
    """Bytes by part and moment."""
    c, m, clips = (
        plan.config,
        plan.model,
        (rollout_sampling(plan.config), validation_sampling(plan.config)),
    )
    master, compute, mine = (
        BYTES[c.master_weight_type],
        BYTES[c.dtype],
        plan.trained.total / plan.shards,
    )
    base = m.parameters / plan.shards * (compute if c.use_lora else master) + (
        mine * master if c.use_lora else 0.0
    )
    muon = plan.trained.matrices / plan.shards if c.optimizer == "muon" else 0.0
    anchored, size = c.trust_region.anchor is not None, plan.windows.size
    on_gpu = anchored and (c.use_lora or not c.reference_mode_offload)
    states = (
        (2 + anchored) * size + 2
        if plan.algorithm.explores
        else (3 + anchored) * plan.trained_steps + 1
    )
    rewards = [*plan.rewards, (0.0, 0.0, 0.0)]
    return {
        "weights": at(base),
        "gathered weights": gathered(plan),
        "gradients": gradients(plan),
        "optimizer": at(
            (2 * mine - muon) * master, step=(mine - muon) * master
        ),  # AdamW's step copies one
        "anchor": at(mine * (master if c.use_lora else compute), anchor=mine * master)
        if on_gpu
        else at(0.0),
        "EMA": at(mine * master * (bool(c.ema_decay) + c.lags), rollout=mine * master * c.lags),
        "activations": activations(plan),
        "trajectories": at(states * plan.latents * m.channels * 4 * c.batch_size),
        "VAE": at(m.vae * compute, decode=max(decoding(plan, clip) for clip in clips)),
        "reward": at(
            sum(size for size, *_ in rewards), reward=max(inside for _, inside, _ in rewards)
        ),
    }


def decoding(plan: Plan, clip: Sampling) -> float:
    """Bytes inside the VAE."""
    untiled = plan.model.video_tokens(clip.frames, clip.height, clip.width) * plan.variant(
        plan.model.untiled
    )
    return untiled if untiled <= plan.config.decode_gb * 1e9 else plan.model.tiled * clip.frames


def gathered(plan: Plan) -> dict[str, float]:
    """The current block, the next one, and everything outside blocks; or all weights during rollout and anchor."""
    c, m = plan.config, plan.model
    if not c.enable_fsdp:
        return at(0.0)
    few = (m.parameters - (m.layers - 2) * m.block) * BYTES[c.dtype]
    kept = m.parameters * BYTES[c.dtype] if c.gather_for_rollout else few
    return at(0.0, rollout=kept, anchor=kept, update=few)


def gradients(plan: Plan) -> dict[str, float]:
    c, trained = plan.config, plan.trained.total
    mine = trained / plan.shards * BYTES[c.master_weight_type]
    if not c.enable_fsdp:
        return at(
            0.0, update=mine, step=mine * (2 if plan.gpus > 1 else 1)
        )  # summed as one flat copy
    whole = trained if c.reduces_once else trained * 2 / plan.model.layers  # two blocks in flight
    kept = mine if c.gradient_accumulation_steps > 1 else 0.0
    return at(kept, update=mine - kept + whole * 4, step=mine - kept)


def activations(plan: Plan) -> dict[str, float]:
    """Each guidance branch keeps every block's input, or more; one block at a time is active."""
    c, m, r, layers = plan.config, plan.model, plan.rates, plan.model.layers
    tokens = plan.tokens * plan.micro_batch / c.sp_size
    unit, exchange = tokens * m.width * BYTES[c.dtype], r.exchange if c.sp_size > 1 else 0.0
    normalizers = tokens * m.heads * 4
    block = 2 * unit + normalizers if c.keep_attention else unit
    graph = layers * (plan.recomputed * block + (1 - plan.recomputed) * r.saved * unit)
    forward, training = (
        unit * (plan.variant(pair) + exchange) for pair in (r.inner_forward, r.inner_training)
    )
    return at(0.0, rollout=forward, anchor=forward, update=plan.trained_branches * graph + training)


def peak(plan: Plan) -> tuple[str, float]:
    """The moment of peak memory, and its bytes."""
    parts = memory(plan).values()
    totals = {moment: sum(part[moment] for part in parts) for moment in MOMENTS}
    return max(totals.items(), key=lambda item: item[1])


def fits(plan: Plan, gpu_bytes: float) -> bool:
    return peak(plan)[1] + plan.rates.reserve <= gpu_bytes


def checkpoint_bytes(config: Config, trained: Trained) -> int:
    """One checkpoint: weights, optimizer state, anchor, averaged weights; an adapter also as diffusers reads it."""
    master, anchored = BYTES[config.master_weight_type], config.trust_region.anchor is not None
    anchor = BYTES[config.master_weight_type if config.use_lora else config.dtype] * anchored
    copies = 3 + bool(config.ema_decay) + config.lags + config.use_lora
    halved = trained.matrices if config.optimizer == "muon" else 0  # one moment instead of two
    return trained.total * (copies * master + anchor) - halved * master


def export_bytes(plan: Plan) -> int:
    """All weights in diffusers layout, which some checkpoints hold besides; with LoRA none do."""
    return (
        0 if plan.config.use_lora else plan.model.parameters * BYTES[plan.config.master_weight_type]
    )


def disk_bytes(plan: Plan) -> int:
    """What a run needs at most: the kept checkpoints, the next one, and the exports in them."""
    count = plan.config.keep_checkpoints + 1
    exports = count if plan.config.export_interval else 1
    return count * checkpoint_bytes(plan.config, plan.trained) + exports * export_bytes(plan)


def snapshot_bytes(plan: Plan) -> float:
    """Host memory of an asynchronous save: what the ranks of the fullest node write."""
    share = min(1.0, plan.rates.gpus_per_node / plan.shards)
    return checkpoint_bytes(plan.config, plan.trained) * share if plan.config.async_save else 0.0
