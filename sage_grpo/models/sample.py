"""The denoising loop, shared by generation, rollouts and validation.

Shapes: B clips of one prompt, C latent channels, (T, y, x) latent frames, rows and columns.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sage_grpo import rng
from sage_grpo.algo.sde import Schedule, Step, build_schedule
from sage_grpo.algo.solver import ode_tables
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

    `between` is called after each step.
    """
    delta, factor = (table.float().to(x) for table in ode_tables(sigmas, solver))
    levels = sigmas.to(x.device, torch.float32)
    per_clip = (-1, *[1] * (x.ndim - 1))  # shape in which a number per clip broadcasts over x
    previous_clean = None

    for i in range(sigmas.shape[-1] - 1):
        sigma = levels[..., i].expand(len(x))
        velocity = backbone.velocity(x, sigma, cond, guidance)
        x_next = x - delta[..., i].reshape(per_clip) * velocity

        if solver != "euler":  # second order: extrapolate from the last two predictions of x0
            clean = x - sigma.reshape(per_clip) * velocity
            if previous_clean is not None:
                x_next = x_next + factor[..., i].reshape(per_clip) * (clean - previous_clean)
            previous_clean = clean

        x = x_next
        between()
    return x


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
