"""How well a model has learnt the shapes world: clips of random prompts, read by the exact oracle."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from sage_grpo.algo.sde import Schedule
from sage_grpo.models.policy import Policy
from sage_grpo.models.sample import counter_noise, denoise
from sage_grpo.worlds.oracle import read
from sage_grpo.worlds.shapes import ATTRIBUTES, captions, parse, render, sample_scenes

GOLD = ("match", "distance", "prompt_distance")


def random_prompts(count: int, seed: int) -> list[str]:
    """Distinct captions drawn evenly."""
    scenes = sample_scenes(4 * count, torch.Generator().manual_seed(seed))
    return list(dict.fromkeys(captions(scenes)))[:count]


@torch.no_grad()
def sample_clips(
    policy: Policy, schedule: Schedule, prompts: Sequence[str], per_prompt: int, guidance: float, seed: int = 0
) -> Iterator[Tensor]:
    """uint8 clips (per_prompt, F, H, W, 3) of each prompt; noise by counter."""
    settings = policy.sampling
    shape = policy.latent_shape(settings.frames, settings.height, settings.width)
    conditions = policy.encode(["", *prompts])
    for number, cond in enumerate(tqdm(conditions[1:], "sampling", unit="prompt", leave=False)):
        x, noise = counter_noise(shape, seed, range(per_prompt), prompt=number)
        *_, last = denoise(policy, schedule, x.to(cond.text.device), cond, guidance, conditions[0], noise)
        yield policy.decode(last.x_next).cpu()


def gold(clips: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
    """Of each clip, (B,) fp64: whether it matches its prompt, its distances to manifold and prompt's part."""
    reading = read(clips, prompts)
    return {name: getattr(reading, name).double().cpu() for name in GOLD}


def quality(clips: Tensor, prompts: Sequence[str]) -> dict[str, float]:
    """Shares of clips (B, F, H, W, 3) whose attributes match their prompts, and mean distances to the manifold."""
    reading = read(clips, prompts)
    result = {"match": reading.match.double().mean().item(), "distance": reading.distance.mean().item()}
    result["prompt_distance"] = reading.prompt_distance.mean().item()
    wanted = [parse(prompt) for prompt in prompts]
    for name in ATTRIBUTES:
        named = [i for i, attributes in enumerate(wanted) if name in attributes]
        target = torch.tensor([wanted[i][name] for i in named])
        result[name] = (reading.attributes[name][named].cpu() == target).double().mean().item()
    return result


def round_trip(policy: Policy, count: int, seed: int = 0) -> tuple[Tensor, Tensor, list[str]]:
    """Rendered clips, the same after the model's VAE, uint8 (count, F, H, W, 3), and their full captions."""
    settings, scenes = policy.sampling, sample_scenes(count, torch.Generator().manual_seed(seed))
    clips = (render(scenes, settings.frames, settings.height, settings.width) * 255).round().to(torch.uint8)
    return clips, policy.decode(policy.encode_video(clips)).cpu(), captions(scenes)


def vae_floor(policy: Policy, count: int = 16) -> float:
    """Mean manifold distance of rendered clips after the VAE: the least that a sample can have."""
    _, decoded, prompts = round_trip(policy, count)
    return gold(decoded, prompts)["distance"].mean().item()
