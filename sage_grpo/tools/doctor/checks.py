"""Checks of a configuration on its model, prompts and reward.

Each takes an assembled trainer and yields results; nothing is trained or written.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from sage_grpo.config.fields import Config
from sage_grpo.models.sample import counter_noise, denoise, integrate, schedule_of
from sage_grpo.tools import audit
from sage_grpo.tools.doctor.check_result import CheckResult, indented, note, ok, wrong
from sage_grpo.tools.doctor.update import check_update
from sage_grpo.tools.plan.summary import few_prompts_warning
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.windows import num_trained

REWARD_CLIPS = 16
VAE_CLIPS = 4
VAE_LIMIT = 0.05  # RMS, relative to the pixel range: 26 dB, where details are visibly lost
# How far rounding may drive two identical trajectories apart, relative to their norm
ODE_LIMIT = {"fp32": 1e-4, "bf16": 0.05}


def check_batch(trainer: Trainer) -> Iterator[CheckResult]:
    """Describe one iteration. That layout and groups divide was checked when the trainer was assembled."""
    c = trainer.config
    ranks = trainer.ranks.dp_size
    shards = trainer.ranks.world_size // c.dp_replicate if c.enable_fsdp else 1
    yield ok(
        "layout",
        f"{ranks} data-parallel x {c.sp_size} sequence-parallel rank(s), weights in {shards} shard(s)",
        numbers={"data": ranks, "sequence": c.sp_size, "shards": shards},
    )

    micro_batches = trainer.micro_batches()
    clips_per_micro_batch = len(micro_batches[0])
    clips = c.batch_size * ranks
    trained_steps = num_trained(trainer.windows.size, c.timestep_fraction)
    trained_clips = c.rank_trained * ranks
    pairs = c.gradient_accumulation_steps * trained_clips * trained_steps // c.updates_per_rollout
    chosen = ""
    if trained_clips < clips:
        chosen = f"the best and worst {c.group_trained} of each group are trained: {trained_clips} clips; "
    yield ok(
        "batch",
        f"{clips} clips per iteration: {clips // c.num_generations} prompt(s) x groups of "
        f"{c.num_generations}, {ranks} rank(s) x {len(micro_batches)} micro-batch(es) x "
        f"{clips_per_micro_batch} clip(s); {chosen}{trained_steps} of {c.num_sampling_steps} denoising "
        f"steps are trained, {pairs} (clip, step) pairs in each optimizer step",
        numbers={
            "clips_per_iteration": clips,
            "ranks": ranks,
            "micro_batches_per_rank": len(micro_batches),
            "clips_per_micro_batch": clips_per_micro_batch,
            "trained_clips": trained_clips,
            "trained_steps": trained_steps,
            "pairs_per_update": pairs,
        },
    )

    prompts_per_update = c.gradient_accumulation_steps * clips // c.num_generations
    if warning := few_prompts_warning(prompts_per_update, c.ema_decay):
        yield note("batch", warning, numbers={"prompts": prompts_per_update})


def check_prompts(trainer: Trainer) -> Iterator[CheckResult]:
    """Count the prompts, and find repeated, shared, missing and truncated ones."""
    backbone = trainer.backbone
    train = list(trainer.requests)
    held_out = list(trainer.validation.requests) if trainer.validation else []
    longest = max([*train, *held_out], key=lambda prompt: len(prompt.text))
    tokens = backbone.num_tokens(*backbone.encode([longest]))
    yield ok(
        "prompts",
        f"{len(train)} to train, {len(held_out)} held out; the longest has {tokens} tokens",
        numbers={"train": len(train), "held_out": len(held_out), "tokens": tokens},
    )

    distinct_train = {str(prompt) for prompt in train}
    repeated = len(train) - len(distinct_train)
    if repeated:
        yield note(
            "prompts",
            f"{repeated} of the training prompts repeat another one, which is trained more often",
            numbers={"count": repeated},
        )
    if len(distinct_train) == 1:
        yield note(
            "prompts",
            "one prompt is trained: what is learned need not hold for any other, and validation may fall",
            numbers={"count": 1},
        )
    shared = len(distinct_train & {str(prompt) for prompt in held_out})
    if shared:
        yield note(
            "prompts",
            f"{shared} of the held-out prompts are also trained on, so validation will flatter",
            numbers={"count": shared},
        )
    if not held_out:
        yield note(
            "prompts", "nothing is held out, so there is no validation: give --validation_prompts"
        )
    if backbone.max_tokens and tokens >= backbone.max_tokens:
        yield note(
            "prompts",
            f"the model reads only the first {backbone.max_tokens} tokens of the longest prompt",
            numbers={"count": backbone.max_tokens},
        )


def check_vae(trainer: Trainer) -> Iterator[CheckResult]:
    """Encode and decode clips. WRONG if they come back too different: above VAE_LIMIT, or not finite."""
    rendered = audit.drawn_clips(trainer.config, trainer.requests, VAE_CLIPS)
    if rendered is None:
        kind = "smooth synthetic"
        clips = color_ramp(trainer.config)[None]
    else:
        kind = "rendered"
        clips = torch.stack(rendered[0])

    latents = trainer.backbone.encode_video(clips)
    decoded = trainer.backbone.decode(latents).cpu()
    difference = (decoded.float() - clips.float()) / 255
    rms = difference.square().mean().sqrt().item()

    mean = latents.mean().item()
    std = latents.std().item()
    text = (
        f"{kind} clips, encoded and decoded, differ by {rms:.3f} of the pixel range "
        f"(RMS, at most {VAE_LIMIT}); their latents have mean {mean:.2f} and standard deviation {std:.2f}"
    )
    numbers = {"kind": kind, "rms": rms, "bound": VAE_LIMIT, "mean": mean, "std": std}
    if rms <= VAE_LIMIT:
        yield ok("vae", text, numbers=numbers)
    else:
        remedy = (
            "the VAE's weights are damaged or belong to another model: "
            "download vae/ again, or try dtype fp32"
        )
        yield wrong("vae", text, remedy, numbers=numbers)


def color_ramp(c: Config) -> Tensor:
    """A uint8 clip (F, H, W, 3) in which red encodes a pixel's time, green its row and blue its column."""
    sides = (c.num_frames, c.height, c.width)
    ramps = [torch.linspace(0, 255, length) for length in sides]
    return torch.stack(torch.meshgrid(*ramps, indexing="ij"), -1).byte()


def check_reward(trainer: Trainer) -> Iterator[CheckResult]:
    """The audit's short form, on clips that show exactly what their prompts say.

    WRONG if the reward fails, is constant or has the wrong sign, if damage does not lower the score that is about it or
    raises the total all the same, or if wrong prompts raise the total. Other edits that raise it are noted.
    """
    rendered = audit.drawn_clips(trainer.config, trainer.requests, REWARD_CLIPS)
    if rendered is None:
        yield note(
            "reward", "not checked: this model has no world that can draw a clip known to be good"
        )
        return

    clips, prompts = rendered
    edits = dict.fromkeys(audit.SHORT, ())
    try:
        scores = audit.measure(trainer.reward, clips, prompts, trainer.config.fps, edits)
    except ValueError as error:
        yield wrong("reward", str(error), "repair the reward", numbers={"error": str(error)})
        return

    verdicts = audit.give_verdicts(scores, drawn=True)
    conclusions = audit.conclude(scores, verdicts, as_part=True)
    table = indented(audit.audit_table(scores, verdicts))
    if conclusions["wrong"]:
        yield wrong(
            "reward",
            "; ".join(conclusions["wrong"]),
            "check the sign of the reward, and reward_weights",
            table=table,
            numbers=conclusions,
        )
    else:
        text = "no wrong reaction to known edits of good clips"
        yield ok("reward", text, table=table, numbers=conclusions)
    for text in conclusions["warnings"]:
        yield note("reward", text)
    if conclusions["unclear"]:
        yield note(
            "reward",
            f"too few clips to tell ({len(clips)}): {', '.join(conclusions['unclear'])}",
            numbers={"clips": len(clips), "unclear": conclusions["unclear"]},
        )


def check_exploration(trainer: Trainer) -> Iterator[CheckResult]:
    """Compare the injected noise with the noise level of the state it is added to."""
    c = trainer.config
    if not trainer.algorithm.explores:
        text = f"{c.algorithm} injects none: clips of a group differ by their initial noise"
        yield ok("noise", text, numbers={"energy": 0.0, "over": []})
        return

    schedule = trainer.schedule.window(trainer.windows.steps)
    stds = schedule.std.tolist()
    next_levels = schedule.sigmas[1:].tolist()
    inner_steps = range(schedule.num_steps - 1)
    excessive_steps = [step for step in inner_steps if stds[step] > next_levels[step]]
    energy = sum(std * std for std in stds)
    text = f"{c.sde_type} at eta {c.eta:g} injects noise of energy {energy:.3g} (the sum of std^2)"
    if excessive_steps:  # whether that hurts, the comparison of the samplers measures
        step = excessive_steps[0]
        text += (
            f"; at step {step} std {stds[step]:.2g}, more than the noise level "
            f"{next_levels[step]:.2g} of the next state"
        )
    else:
        text += ", at no step more than the noise level of the next state"
    yield ok("noise", text, numbers={"energy": energy, "over": excessive_steps})

    if stds[-1]:
        yield note(
            "noise",
            f"the noise of the last step, std {stds[-1]:.2g}, stays in the clip that is scored; "
            "sde_window all_but_last makes that step deterministic",
            numbers={"std": stds[-1]},
        )


@torch.no_grad()
def check_noise_free(trainer: Trainer) -> Iterator[CheckResult]:
    """Sample with eta 0. WRONG if the latents are not those of the ODE from the same initial noise."""
    c = trainer.config
    sigmas = trainer.schedule.sigmas
    device = sigmas.device
    cond = trainer.backbone.encode([trainer.requests[0]])[0].to(device)
    x, noise = counter_noise(trainer.backbone.free_shape(trainer.shape, cond), c.seed, [0])
    x = x.to(device)

    ode = integrate(trainer.backbone, sigmas.cpu(), x, cond, trainer.guidance)
    schedule = schedule_of(c.sde_type, sigmas.cpu(), 0.0).to(device)
    latents = denoise(trainer.backbone, schedule, x, cond, trainer.guidance, noise)
    difference = ((latents - ode).norm() / ode.norm()).item()

    text = (
        f"{c.sde_type} at eta 0 and a plain Euler ODE: "
        f"the latents differ by {difference:.1g} of their norm"
    )
    numbers = {"difference": difference}
    if difference <= ODE_LIMIT[c.dtype]:
        yield ok("noise 0", text, numbers=numbers)
    else:
        remedy = f"at eta 0 the table of {c.sde_type} (algo/sde.py) must be a = 1, b = next - sigma, std = 0"
        yield wrong("noise 0", text, remedy, numbers=numbers)


# In the order in which they run
CHECKS: dict[str, Callable[[Trainer], Iterator[CheckResult]]] = {
    "batch": check_batch,
    "prompts": check_prompts,
    "vae": check_vae,
    "reward": check_reward,
    "exploration": check_exploration,
    "noise_free": check_noise_free,
    "update": check_update,
}
