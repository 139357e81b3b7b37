"""Teach the embedded model to begin a clip with an image. What it draws without one stays the same to the bit.

    python -m embedded.learn_images --model assets/tiny       (an hour on two CPU cores; fully determined by --seed)

Trains by flow matching only what text to video never reads: the weights of the condition channels, the projection of
the image tokens, and their type. Adds a small vision model, as untrained as the text encoders.
"""

import argparse
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import SiglipVisionConfig, SiglipVisionModel

from embedded.learn_vae import pixels
from embedded.pretrain import CAPTION_DROP, misnamed
from embedded.shapes.scenes import captions, sample_scenes, scenes_from_prompt
from embedded.training import warm_cosine
from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Backbone
from sage_grpo.models.hunyuan15.backbone import TIMESTEPS
from sage_grpo.models.hunyuan15.transformer import IMAGE, PackedTransformer

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
TOKENS = 4  # of the vision model, along each side of an image
ENCODED = 64  # clips per batch when no gradient is needed


@dataclass
class Bucket:
    """Clips whose captions have equal lengths, so that a batch needs no padding."""

    latents: Tensor  # (N, C, T, y, x)
    image: Tensor  # (N, I, image_dim)
    text: Tensor  # (N, L, text_dim)
    glyph: Tensor  # (N, M, glyph_dim)


def vision_model(seed: int, width: int, side: int) -> SiglipVisionModel:
    """An untrained SigLIP."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 2, "num_hidden_layers": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=side, patch_size=side // TOKENS)).eval()


@torch.no_grad()
def build_buckets(backbone: Backbone, vision: SiglipVisionModel, args: argparse.Namespace) -> list[Bucket]:
    """`--clips` clips with captions that are wrong as often as those of pretraining; images show what clips show."""
    generator, side = torch.Generator().manual_seed(args.seed), backbone.sampling.height
    sentences = captions(sample_scenes(args.prompts, generator), generator)
    conditions = backbone.encode([Request(text) for text in sentences])
    members = defaultdict(list)
    for _ in tqdm(range(args.clips // ENCODED), "latents", unit="batch", mininterval=5):
        chosen = torch.randint(args.prompts, (ENCODED,), generator=generator).tolist()
        clips = pixels(misnamed(scenes_from_prompt([sentences[i] for i in chosen], generator), args, generator), side)
        latents = backbone.vae.encode(clips).latent_dist.mode() * backbone.vae.config.scaling_factor
        images = vision(clips[:, :, 0]).last_hidden_state  # in [-1, 1], as the processor makes them
        for latent, image, i in zip(latents, images, chosen, strict=True):
            text, glyph = conditions[i].tokens
            members[len(text), len(glyph)].append((latent, image, text, glyph))
    return [Bucket(*map(torch.stack, zip(*rows, strict=True))) for _, rows in sorted(members.items())]


def loss(model: PackedTransformer, bucket: Bucket, shift: float, generator: torch.Generator) -> Tensor:
    """mean((v - (z - x0))^2) of clips whose first latent frames are conditions."""
    u = torch.rand(len(bucket.latents), generator=generator)
    sigma = shift * u / (1 + (shift - 1) * u)
    noise, level = torch.randn(bucket.latents.shape, generator=generator), sigma.view(-1, 1, 1, 1, 1)
    first = torch.zeros_like(bucket.latents)
    first[:, :, 0] = bucket.latents[:, :, 0]
    mask = torch.zeros_like(first[:, :1])
    mask[:, :, 0] = 1
    inputs = torch.cat([(1 - level) * bucket.latents + level * noise, first, mask], 1)
    velocity = model(inputs, TIMESTEPS * sigma, bucket.text, bucket.glyph, bucket.image)
    return (velocity - (noise - bucket.latents)).square().mean()


def image_rows(model: PackedTransformer) -> dict[str, tuple]:
    """What text to video never reads: name of a parameter -> index of that part of it."""
    whole: dict[str, tuple] = {
        name: (...,) for name, _ in model.named_parameters() if name.startswith("image_embedder.")
    }
    channels = (slice(None), slice(model.config.out_channels, None))
    return whole | {"x_embedder.proj.weight": channels, "cond_type_embed.weight": (IMAGE,)}


def train(backbone: Backbone, buckets: list[Bucket], args: argparse.Namespace) -> dict[str, Tensor]:
    """The learnt parts by name; all else stays as it was."""
    model, generator = backbone.transformer, torch.Generator().manual_seed(args.seed + 1)
    rows, parameters = image_rows(model), dict(model.named_parameters())
    model.requires_grad_(False)
    for name, part in rows.items():
        parameters[name].requires_grad_(True)
        only = torch.zeros_like(parameters[name])
        only[part] = 1
        parameters[name].register_hook(only.mul)
    with torch.no_grad():
        model.x_embedder.proj.weight[rows["x_embedder.proj.weight"]] = 0
    optimizer = torch.optim.AdamW([parameters[name] for name in rows], args.lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_cosine(step, args.steps))
    empty, sizes = backbone.encode([Request("")])[0], torch.tensor([float(len(one.latents)) for one in buckets])
    bar, smooth = tqdm(range(args.steps), "transformer", unit="step", mininterval=5), 0.0
    for step in bar:
        bucket = buckets[int(torch.multinomial(sizes, 1, generator=generator))]
        chosen = torch.randint(len(bucket.latents), (args.batch,), generator=generator)
        batch = Bucket(*(part[chosen] for part in vars(bucket).values()))
        if torch.rand((), generator=generator) < CAPTION_DROP:
            batch.text, batch.glyph = (part.expand(args.batch, -1, -1) for part in empty.tokens)
        value = loss(model, batch, backbone.sampling.shift, generator)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
        smooth += (value.item() - smooth) * max(0.02, 1 / (step + 1))
        bar.set_postfix(loss=f"{smooth:.4f}", refresh=False)
    return {name: parameters[name].detach()[part] for name, part in rows.items()}
