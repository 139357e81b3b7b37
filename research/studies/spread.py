"""How far clips of one prompt spread in what the prompt leaves open: training must not narrow it.

A reward says nothing about what no prompt names, so a policy may settle on one size, speed or background without any
loss of reward. Prompts that leave these three open are sampled several times, by the ODE, from the base model and from
the last weights of a run, with the same noise; the oracle reads the clips.

    classes   share of pairs of clips of a prompt that differ in an open attribute, mean over attributes
    places    standard deviation of where the object starts, over the clips of a prompt, in widths of the frame
    match     share of the clips that show what their prompt names

and both spreads also over the pairs in which both clips match, because the oracle may read a blurred clip as anything.
Noise and prompts are the same in all runs, so the base model has the same values everywhere. Clips of the world itself
have 0.556 in classes: its two sizes, two speeds and three backgrounds are equally likely.
"""

from collections.abc import Sequence
from itertools import combinations, product

import torch
from torch import Tensor

from research.studies.path_kl import last_checkpoint
from sage_grpo.algo.sde import flow_sigmas
from sage_grpo.config.fields import Config
from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Backbone, Guidance
from sage_grpo.models.registry import device_for
from sage_grpo.models.sample import counter_noise, integrate
from sage_grpo.train.build import open_model
from sage_grpo.train.validation import validation_sampling
from sage_grpo.worlds.shapes.oracle import Reading, read
from sage_grpo.worlds.shapes.scenes import ATTRIBUTES, OPTIONAL, sentence

PROMPTS = 16
CLIPS = 8  # of each prompt
STRIDE = 11  # through all colors, shapes and directions: it shares no factor with their number, so that all occur


def open_prompts(count: int = PROMPTS) -> list[Request]:
    """Prompts that name a color, a shape and a direction, and leave everything else open."""
    kinds = {name: words for name, words in ATTRIBUTES.items() if name not in OPTIONAL}
    combined = list(product(*kinds.values()))
    requests = []
    for i in range(count):
        words = dict(zip(kinds, combined[i * STRIDE % len(combined)], strict=True))
        requests.append(Request(sentence(dict.fromkeys(OPTIONAL, "") | words), i))
    return requests


@torch.no_grad()
def sampled(backbone: Backbone, config: Config, prompts: Sequence[Request], clips: int) -> Tensor:
    """uint8 clips (len(prompts) * clips, F, H, W, 3), sampled as in validation. config: a resolved one."""
    sampling = validation_sampling(config)
    sigmas = flow_sigmas(sampling.num_steps, sampling.shift)
    shape = backbone.latent_shape(sampling.frames, sampling.height, sampling.width)
    seed = config.validation_global_seed
    negative, *conditions = backbone.encode([Request(config.negative_prompt), *prompts])
    guidance = Guidance(config.guidance_scale, negative)

    decoded = []
    for prompt, cond in zip(prompts, conditions, strict=True):
        x, _ = counter_noise(shape, seed, range(clips), "generate", prompt.index)
        latents = integrate(backbone, sigmas, x.to(backbone.device), cond, guidance)
        decoded.append(backbone.decode(latents).cpu())
    return torch.cat(decoded)


def spread_of(reading: Reading, clips: int) -> dict[str, float]:
    """Spread of the clips of each prompt, which are neighbors in `reading`; NaN without a pair that matches."""
    attributes = torch.stack([reading.attributes[name].cpu() for name in OPTIONAL])
    starts = torch.stack([reading.scenes.x.cpu(), reading.scenes.y.cpu()])
    classes = attributes.view(len(OPTIONAL), -1, clips)  # (attributes, prompts, clips)
    places = starts.view(2, -1, clips).double()
    match = reading.match.cpu().view(-1, clips)

    # Over all pairs of clips of a prompt, (prompts, pairs); the mean of `apart` over pairs is the variance.
    first, second = torch.tensor(list(combinations(range(clips), 2))).T
    differ = (classes[..., first] != classes[..., second]).double().mean(0)
    apart = (places[..., first] - places[..., second]).square().mean(0) / 2
    both = match[:, first] & match[:, second]

    spread = {"match": match.double().mean().item()}
    for suffix, pairs in {"": torch.ones_like(both), " if both match": both}.items():
        spread[f"classes{suffix}"] = differ[pairs].mean().item()
        spread[f"places{suffix}"] = apart[pairs].mean().sqrt().item()
    return spread


def measure(config: Config) -> dict[str, dict[str, float]]:
    """The spread of the base model, and of a finished run."""
    checkpoint = last_checkpoint(config)
    device = device_for(
        config.device, config.pretrained_model_root, config.pretrained_transformer_version
    )
    backbone, resolved = open_model(config, torch.device(device))
    prompts = open_prompts()
    backbone.prepare([Request(resolved.negative_prompt), *prompts])
    texts = [prompt.text for prompt in prompts for _ in range(CLIPS)]

    def spread_now() -> dict[str, float]:
        clips = sampled(backbone, resolved, prompts, CLIPS).to(backbone.device)
        return spread_of(read(clips, texts), CLIPS)

    base = spread_now()
    backbone.load_weights(checkpoint)
    return {"base": base, "end": spread_now()}
