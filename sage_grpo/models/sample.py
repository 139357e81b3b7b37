"""The denoising loop, shared by generation, rollouts and validation.

Shapes: B clips of one prompt, C latent channels, (T, y, x) latent frames, rows and columns.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sage_grpo import rng
from sage_grpo.algo.sde import Schedule, Step, build_schedule
from sage_grpo.algo.solver import OdeTables, ode_tables
from sage_grpo.models.backbone import Backbone, Conditioning, Guidance
from sage_grpo.plugins import contained, in_file, resolved

# Denoising step, shared or one per clip -> standard normal noise (B, C, T, y, x), on any device.
Noise = Callable[[Step], Tensor]


def schedule_of(sde_type: str, sigmas: Tensor, eta: float) -> Schedule:
    """The transition tables of a sampler: a row of SDES, or `FILE.py:NAME` of the command line."""
    sampler = resolved(sde_type)
    if not in_file(sde_type):
        return build_schedule(sampler, sigmas, eta)
    with contained(f"sde_type {sde_type} cannot be used", passes=()):
        return build_schedule(sampler, sigmas, eta)


def denoise(
    backbone: Backbone,
    schedule: Schedule,
    x: Tensor,
    cond: Conditioning,
    guidance: Guidance,
    noise: Noise,
) -> Tensor:
    """Run all steps from the initial noise x, (B, C, T, y, x), and return the final latents.

    Each clip is passed its own noise level, though all are equal: in training they differ, and only a forward of the
    same shape gives the same bits.
    """
    for i in range(schedule.num_steps):
        sigma = schedule.sigmas[i].expand(len(x))
        velocity = backbone.velocity(x, sigma, cond, guidance)
        x, _ = schedule.step(i, x, velocity, noise(i).to(x.device))
    return x


def integrate(
    backbone: Backbone,
    sigmas: Tensor,
    x: Tensor,
    cond: Conditioning,
    guidance: Guidance,
    solver: str = "euler",
    between: Callable[[], None] = lambda: None,
) -> Tensor:
    """Follow the ODE from x, (B, C, T, y, x), over the noise levels `sigmas`, (n+1,) or (B, n+1).

    `between` is called after each step. Guidance of an interval is on or off for all clips of a step, by the highest of
    their levels.
    """
    tables = ode_tables(sigmas, solver).to(x)
    levels = sigmas.to(x.device, torch.float32)
    per_clip = (-1, *[1] * (x.ndim - 1))  # shape in which a number per clip broadcasts over x
    earlier: list[Tensor] = []  # predictions of the clean clip, the latest first
    begin = x  # where the step before began

    for i in range(sigmas.shape[-1] - 1):
        sigma = levels[..., i].expand(len(x))
        step_guidance = guidance.at(sigmas[..., i].max().item())
        velocity = backbone.velocity(x, sigma, cond, step_guidance)
        x_next = x - tables.delta[..., i].reshape(per_clip) * velocity

        if solver != "euler":  # extrapolate from this and earlier predictions of the clean clip
            clean = x - sigma.reshape(per_clip) * velocity
            ratio = tables.ratio[..., i].reshape(per_clip)
            if tables.correction is not None and earlier:
                x = corrected(tables, i - 1, begin, clean, earlier)
                x_next = ratio * x + (1 - ratio) * clean
            weights = tables.history[..., i, :].unbind(-1)
            for weight, clean_before in zip(weights, earlier, strict=False):
                x_next = x_next + weight.reshape(per_clip) * (clean - clean_before)
            earlier = [clean, *earlier[:1]]

        begin = x
        x = x_next
        between()
    return x


def corrected(
    tables: OdeTables, i: int, begin: Tensor, clean_next: Tensor, earlier: Sequence[Tensor]
) -> Tensor:
    """The end of step i, which began in `begin`, once the clean clip predicted there is known; (B, C, T, y, x).

    earlier: the predictions at the beginning of the step and before, the latest first.
    """
    per_clip = (-1, *[1] * (begin.ndim - 1))
    clean, *before = earlier
    *weights, weight_next = tables.correction[..., i, :].unbind(-1)
    ratio = tables.ratio[..., i].reshape(per_clip)
    x = ratio * begin + (1 - ratio) * clean
    for weight, clean_before in zip(weights, before, strict=False):
        x = x + weight.reshape(per_clip) * (clean - clean_before)
    return x + weight_next.reshape(per_clip) * (clean_next - clean)


def counter_noise(
    shape: Sequence[int],
    seed: int,
    samples: Sequence[int],
    purpose: str = "generate",
    prompt: int | Sequence[int] = 0,
    iteration: int = 0,
    init_samples: Sequence[int] | None = None,
) -> tuple[Tensor, Noise]:
    """Initial noise and per-step noise for the clips numbered `samples`, independent of batch and rank.

    shape: of one clip's latents, (C, T, y, x). purpose: `generate`, or `rollout` for training. prompt: index of the
    prompt, one for all clips or one per clip. init_samples: clips whose initial noise to use instead.
    """
    prompts = [prompt] * len(samples) if isinstance(prompt, int) else prompt

    def draw(kind: str, numbers: Sequence[int], index: int | Tensor = 0) -> Tensor:
        indices = torch.as_tensor(index).expand(len(numbers)).tolist()
        clips = [
            rng.normal(
                shape,
                seed,
                f"{purpose}_{kind}",
                step=iteration,
                prompt=clip_prompt,
                sample=n,
                index=i,
            )
            for clip_prompt, n, i in zip(prompts, numbers, indices, strict=True)
        ]
        return torch.stack(clips)

    return draw("init", init_samples or samples), lambda i: draw("sde", samples, i)
