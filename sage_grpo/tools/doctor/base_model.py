"""Questions that a run cannot answer: does the model sample as it was trained to, and does damage lower its reward?

A wrong shift, a wrong scale of the VAE or a reward with the wrong sign train without an error. Here clips sampled with
the model's own defaults are the yardstick. A shift only decides where the steps of the ODE are placed, so it is also
judged by how far from the exact solution they end: a few clips show that even if their rewards do not.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sage_grpo.algo.sde import flow_sigmas
from sage_grpo.data.requests import Request
from sage_grpo.intervals import Interval, interval
from sage_grpo.models.backbone import Guidance, Sampling
from sage_grpo.models.sample import counter_noise, integrate
from sage_grpo.tools import audit
from sage_grpo.tools.doctor.check_result import CheckResult, indented, note, ok, wrong
from sage_grpo.train.build import rollout_sampling
from sage_grpo.train.clips import decoded
from sage_grpo.train.trainer import Trainer

# Decoded and encoded again, latents keep their size; a VAE with another scale than the model was trained with does not.
MIN_RATIO = 0.7
EDITS = ("noisy", "shaky", "frozen", "blurred")
WORSE = 0.25  # standard deviations of the reward over clips, below which a loss is not reported
# Times as far from the exact solution of the ODE, below which a shift is not reported. The embedded model, whose
# shift is 3, ends 1.4 to 1.6 times as far with shift 1 in 3 to 10 steps, and at most 1.2 times with shifts of 2 to 8.
FARTHER = 1.25
# steps of second order that stand for the exact solution: so many, and at least this many times those of the run
EXACT_STEPS = 20
EXACT_FACTOR = 2
MAX_CLIPS = 2  # of each prompt whose distance from the exact solution is taken


@dataclass(frozen=True)
class Sampled:
    """Clips of one way of sampling, without exploration noise; N clips."""

    latents: Tensor  # (N, ...)
    clips: list[Tensor | None]  # uint8 (F, H, W, 3); None if not finite
    requests: list[Request]


def sampled(
    trainer: Trainer, num_steps: int, sampling: Sampling, prompts: int, clips: int
) -> Sampled:
    """Clips of the rollout's size, with shift and guidance of `sampling`; the noise is always the same."""
    latents = sampled_latents(trainer, num_steps, sampling, prompts, clips)
    return Sampled(
        latents=latents,
        clips=[clip for latent in latents.split(1) for clip in decoded(trainer.backbone, [latent])],
        requests=[request for request in trainer.requests[:prompts] for _ in range(clips)],
    )


@torch.no_grad()
def sampled_latents(
    trainer: Trainer,
    num_steps: int,
    sampling: Sampling,
    prompts: int,
    clips: int,
    solver: str = "euler",
) -> Tensor:
    """Latents (prompts * clips, ...), prompt by prompt."""
    backbone = trainer.backbone
    device = trainer.ranks.device
    scale = Guidance(sampling.guidance, trainer.guidance.negative, scale_2=sampling.guidance_2)
    sigmas = flow_sigmas(num_steps, sampling.shift)
    latents = []
    for request in trainer.requests[:prompts]:
        cond = backbone.encode([request])[0].to(device)
        shape = backbone.free_shape(trainer.shape, cond)
        for clip in range(clips):
            x, _ = counter_noise(shape, trainer.config.seed, [clip], prompt=request.index)
            x = integrate(backbone, sigmas, x.to(device), cond, scale, solver)
            latents.append(backbone.full_latents(x, cond))
    return torch.cat(latents)


def log_distance_ratio(
    trainer: Trainer, sampling: Sampling, num_prompts: int, num_clips: int
) -> Interval:
    """Log of how many times as far from the exact solution of the ODE clips end as with the model's own shift.

    The noise, the guidance and the number of steps are the same.
    """
    num_steps = trainer.config.num_sampling_steps
    own_shift = replace(sampling, shift=trainer.backbone.sampling.shift)
    rows = {"prompts": num_prompts, "clips": min(num_clips, MAX_CLIPS)}
    exact_steps = max(EXACT_STEPS, EXACT_FACTOR * num_steps)
    exact = sampled_latents(trainer, exact_steps, own_shift, **rows, solver="dpm")
    distances = []
    for settings in (sampling, own_shift):
        latents = sampled_latents(trainer, num_steps, settings, **rows)
        distances.append((latents - exact).flatten(1).norm(dim=1))
    return interval((distances[0] / distances[1]).log().tolist())


def check_base_model(trainer: Trainer, num_prompts: int, num_clips: int) -> Iterator[CheckResult]:
    """Clips of the model's own sampling defaults against those of the run, their latents, and damage to them."""
    c = trainer.config
    own = trainer.backbone.sampling
    yardstick = sampled(trainer, c.num_sampling_steps, own, num_prompts, num_clips)
    settings = {"rollouts": rollout_sampling(c)}
    if trainer.validation:
        settings["validation"] = trainer.validation.sampling
    for name, sampling in settings.items():
        yield sampling_result(trainer, name, sampling, yardstick, num_prompts, num_clips)
    yield latents_result(trainer, yardstick)
    yield damage_result(trainer, yardstick)


def sampling_result(
    trainer: Trainer,
    name: str,
    sampling: Sampling,
    yardstick: Sampled,
    num_prompts: int,
    num_clips: int,
) -> CheckResult:
    """Whether another shift or guidance than the model's own lowers the reward, at equally many steps.

    A few clips rarely prove that, but they do show whether another shift places the steps worse.
    """
    own = trainer.backbone.sampling
    is_own = all(
        getattr(sampling, setting) == getattr(own, setting)
        for setting in ("shift", "guidance", "guidance_2")
    )
    if is_own:
        text = f"{name} have the model's own {settings_text(own)}"
        return ok("sampling", text, numbers={"of": name, "differs": False})

    c = trainer.config
    others = sampled(trainer, c.num_sampling_steps, sampling, num_prompts, num_clips)
    with_own = trainer.reward.score(yardstick.clips, yardstick.requests, c.fps).total
    with_others = trainer.reward.score(others.clips, others.requests, c.fps).total
    change = interval((with_others - with_own).tolist())
    spread = with_own[with_own.isfinite()].std(correction=0).item()
    numbers = {
        "of": name,
        "differs": True,
        "change": change.mean,
        "half": change.half,
        "spread": spread,
    }
    text = (
        f"{name} have {settings_text(sampling)}, the model's own are {settings_text(own)}: "
        f"in {c.num_sampling_steps} steps that changes the reward by "
        f"{change.mean:+.2g} ± {change.half:.2g}, which varies by {spread:.2g} between clips"
    )
    is_worse = change.sign < 0 and -change.mean > WORSE * spread
    if sampling.shift != own.shift:
        log_ratio = log_distance_ratio(trainer, sampling, num_prompts, num_clips)
        ratio = math.exp(log_ratio.mean)
        low = math.exp(log_ratio.mean - log_ratio.half)
        high = math.exp(log_ratio.mean + log_ratio.half)
        numbers["times_as_far"] = ratio
        text += (
            f", and by the shift alone clips end {ratio:.2g} ({low:.2g} to {high:.2g}) times as far from the exact "
            "solution of the ODE"
        )
        is_worse = is_worse or (log_ratio.sign > 0 and ratio > FARTHER)
    if not is_worse:
        return ok("sampling", text, numbers=numbers)
    flag = "timestep_shift" if name == "rollouts" else "validation_timestep_shift"
    advice = f"unless that is meant, leave out {flag}, guidance_scale and guidance_scale_2"
    return note("sampling", f"{text}; {advice}", numbers=numbers)


def settings_text(sampling: Sampling) -> str:
    """Shift and guidance; with two transformers, the guidance of each."""
    text = f"shift {sampling.shift:g} and guidance {sampling.guidance:g}"
    if sampling.guidance_2 is not None:
        text += f" / {sampling.guidance_2:g}"
    return text


def latents_result(trainer: Trainer, yardstick: Sampled) -> CheckResult:
    """Whether latents that the model samples are of the size that the VAE makes."""
    finite = [row for row, clip in enumerate(yardstick.clips) if clip is not None]
    if not finite:
        return wrong("latents", "no sampled clip is finite", "check the weights, or try dtype fp32")
    latents = yardstick.latents[finite]
    clips = torch.stack([yardstick.clips[row] for row in finite])
    again = trainer.backbone.encode_video(clips)
    ratio = (again.std() / latents.std()).item()
    text = (
        f"sampled latents have standard deviation {latents.std().item():.2f}, and {ratio:.2f} times that "
        "after they were decoded and encoded again"
    )
    numbers = {"std": latents.std().item(), "ratio": ratio}
    if MIN_RATIO < ratio < 1 / MIN_RATIO:
        return ok("latents", text, numbers=numbers)
    remedy = (
        "the VAE expects latents of another size than the model makes: check scaling_factor, or latents_mean and "
        "latents_std, in vae/config.json, unless the weights are random"
    )
    return note("latents", f"{text}; {remedy}", numbers=numbers)


def damage_result(trainer: Trainer, yardstick: Sampled) -> CheckResult:
    """Whether damage to the model's own clips raises the reward, and none lowers it."""
    clips: list[Tensor] = []
    requests: list[Request] = []
    for clip, request in zip(yardstick.clips, yardstick.requests, strict=True):
        if clip is not None:
            clips.append(clip)
            requests.append(request)
    scores = audit.measure(
        trainer.reward, clips, requests, trainer.config.fps, dict.fromkeys(EDITS, ())
    )
    verdicts = audit.give_verdicts(scores, drawn=False)
    totals = [verdict for verdict in verdicts if verdict.score == audit.TOTAL]
    numbers = {verdict.edit: verdict.change.mean for verdict in totals}
    if audit.is_flipped(totals):
        # a note, because a model of poor clips may score higher when they are damaged
        text = f"{audit.FLIPPED}: check the sign of the reward, and reward_weights"
        return note("damage", text, numbers=numbers)
    falls = [verdict.edit for verdict in totals if verdict.mark == "falls"]
    if not falls:
        text = (
            f"no damage to the model's own clips ({', '.join(EDITS)}) lowers the reward for certain"
        )
        return note("damage", text, numbers=numbers)
    text = f"damage to the model's own clips lowers the reward: {', '.join(falls)}"
    table = indented(audit.audit_table(scores, verdicts))
    return ok("damage", text, table=table, numbers=numbers)
