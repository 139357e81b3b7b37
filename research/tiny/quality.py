"""How well a model has learned the shapes world: clips of random prompts, read by the exact oracle."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from sage_grpo.algo.sde import Schedule
from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Backbone, Guidance
from sage_grpo.models.sample import counter_noise, denoise
from sage_grpo.worlds.shapes.oracle import read
from sage_grpo.worlds.shapes.scenes import ATTRIBUTES, captions, parse, sample_scenes


def random_prompts(count: int, seed: int) -> list[str]:
    """Distinct captions drawn uniformly."""
    scenes = sample_scenes(4 * count, torch.Generator().manual_seed(seed))
    return list(dict.fromkeys(captions(scenes)))[:count]


@torch.no_grad()
def sample_clips(
    backbone: Backbone,
    schedule: Schedule,
    prompts: Sequence[str],
    per_prompt: int,
    scale: float,
    seed: int = 0,
) -> Iterator[Tensor]:
    """uint8 clips (per_prompt, F, H, W, 3) for each prompt, at guidance `scale`; counter-based noise."""
    settings = backbone.sampling
    shape = backbone.latent_shape(settings.frames, settings.height, settings.width)
    negative, *conditions = backbone.encode([Request(text) for text in ("", *prompts)])
    guidance = Guidance(scale, negative)
    for number, cond in enumerate(tqdm(conditions, "sampling", unit="prompt", leave=False)):
        x, noise = counter_noise(shape, seed, range(per_prompt), prompt=number)
        latents = denoise(backbone, schedule, x.to(backbone.device), cond, guidance, noise)
        yield backbone.decode(latents).cpu()


def quality(clips: Tensor, prompts: Sequence[str]) -> dict[str, float]:
    """Fractions of clips (B, F, H, W, 3) whose attributes match their prompts, and mean distances to the manifold."""
    reading = read(clips, prompts)
    result = {
        "match": reading.match.double().mean().item(),
        "distance": reading.distance.mean().item(),
        "prompt_distance": reading.prompt_distance.mean().item(),
    }
    wanted = [parse(prompt) for prompt in prompts]
    for name in ATTRIBUTES:
        named = [i for i, attributes in enumerate(wanted) if name in attributes]
        target = torch.tensor([wanted[i][name] for i in named])
        result[name] = (reading.attributes[name][named].cpu() == target).double().mean().item()
    return result
