"""The denoising loop, shared by generation, rollouts and validation.

Shapes: B clips of one prompt, C latent channels, (T, y, x) latent frames, rows and columns.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sage_grpo import rng
from sage_grpo.algo.sde import Schedule, Step
from sage_grpo.algo.solver import ode_tables
from sage_grpo.models.backbone import Backbone, Conditioning, Guidance

Noise = Callable[
    [Step], Tensor
]  # denoising step, or one per clip -> standard normal (B, C, T, y, x), on any device


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
        velocity = backbone.velocity(x, schedule.sigmas[i].expand(len(x)), cond, guidance)
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
    """Follow the ODE from x over the noise levels `sigmas`, (n+1,) or (B, n+1); `between` is called after each step."""
    delta, factor = (table.float().to(x) for table in ode_tables(sigmas, solver))
    levels, each, before = sigmas.to(x.device, torch.float32), (-1, *[1] * (x.ndim - 1)), None
    for i in range(sigmas.shape[-1] - 1):
        sigma = levels[..., i].expand(len(x))
        velocity = backbone.velocity(x, sigma, cond, guidance)
        x_next = x - delta[..., i].reshape(each) * velocity
        if solver != "euler":
            clean = x - sigma.reshape(each) * velocity
            x_next = (
                x_next
                if before is None
                else x_next + factor[..., i].reshape(each) * (clean - before)
            )
            before = clean
        x = x_next
        between()
    return x


def counter_noise(
    shape: Sequence[int],
    seed: int,
    samples: Sequence[int],
    purpose: str = "generate",
    prompt: int | Sequence[int] = 0,
    step: int = 0,
    init_samples: Sequence[int] | None = None,
) -> tuple[Tensor, Noise]:
    """Initial noise and per-step noise for the clips numbered `samples`, independent of batch and rank.

    purpose: `generate`, or `rollout` for training. prompt: of all clips, or one for each. init_samples: clips whose
    initial noise is used instead.
    """
    prompts = [prompt] * len(samples) if isinstance(prompt, int) else prompt

    def draw(kind: str, numbers: Sequence[int], index: int | Tensor = 0) -> Tensor:
        keys = zip(
            prompts, numbers, torch.as_tensor(index).expand(len(numbers)).tolist(), strict=True
        )
        draws = [{"step": step, "prompt": p, "sample": n, "index": i} for p, n, i in keys]
        return torch.stack([rng.normal(shape, seed, f"{purpose}_{kind}", **key) for key in draws])

    return draw("init", init_samples or samples), lambda i: draw("sde", samples, i)
