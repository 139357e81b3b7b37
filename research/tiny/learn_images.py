"""Teach the embedded model to begin a clip with an image. What it draws without one stays the same to the bit.

    python -m research.tiny.learn_images --model assets/tiny     40 minutes on a CPU core; fully determined by --seed

Changes a folder that research/tiny/pretrain.py wrote: trains by flow matching only what text to video never reads,
which is the weights of the condition channels, the projection of the image tokens, and their type. Adds a small vision
model, as untrained as the text encoders, requests with images, and images.json: what the oracle reads in clips of these
requests.
"""

import argparse
import csv
import json
import platform
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import SiglipImageProcessorPil, SiglipVisionConfig, SiglipVisionModel

from research.tiny.learn_vae import FRAMES, pixels
from research.tiny.pretrain import CAPTION_DROP, misnamed
from sage_grpo.algo.sde import flow_sigmas
from sage_grpo.data.requests import Request, read_requests
from sage_grpo.models.backbone import Backbone, Guidance
from sage_grpo.models.hunyuan15.transformer import IMAGE, PackedTransformer
from sage_grpo.models.latent import TIMESTEPS
from sage_grpo.models.registry import open_backbone
from sage_grpo.models.sample import counter_noise, integrate
from sage_grpo.models.versions import ANIMATE
from sage_grpo.rewards.videoalign.training import warm_cosine
from sage_grpo.worlds.shapes.scenes import (
    ATTRIBUTES,
    captions,
    render,
    sample_scenes,
    scenes_from_prompt,
)
from sage_grpo.worlds.shapes.world import ShapesWorld, as_uint8

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
TOKENS = 4  # of the vision model, along each side of an image
ENCODED = 64  # clips per batch when no gradient is needed
REQUESTS = {"train": 64, "valid": 64}  # prompts with images that are shipped with the folder


@dataclass
class Bucket:
    """Clips whose captions have equal lengths, so that a batch needs no padding."""

    latents: Tensor  # (N, C, T, y, x)
    image: Tensor  # (N, I, image_dim)
    text: Tensor  # (N, L, text_dim)
    glyph: Tensor  # (N, M, glyph_dim)


def vision_model(seed: int, width: int, side: int) -> SiglipVisionModel:
    """An untrained SigLIP."""
    config = SiglipVisionConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=2,
        num_hidden_layers=1,
        image_size=side,
        patch_size=side // TOKENS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SiglipVisionModel(config).eval()


@torch.no_grad()
def build_buckets(
    backbone: Backbone, vision: SiglipVisionModel, args: argparse.Namespace
) -> list[Bucket]:
    """`--clips` clips with captions that are wrong as often as those of pretraining; images show what clips show."""
    generator = torch.Generator().manual_seed(args.seed)
    side = backbone.sampling.height
    vae = backbone.vae
    sentences = captions(sample_scenes(args.prompts, generator), generator)
    conditions = backbone.encode([Request(text) for text in sentences])
    members = defaultdict(list)
    for _ in tqdm(range(args.clips // ENCODED), "latents", unit="batch", mininterval=5):
        chosen = torch.randint(args.prompts, (ENCODED,), generator=generator).tolist()
        scenes = scenes_from_prompt([sentences[i] for i in chosen], generator)
        clips = pixels(misnamed(scenes, args, generator), side)
        latents = vae.encode(clips).latent_dist.mode() * vae.config.scaling_factor
        images = vision(clips[:, :, 0]).last_hidden_state  # in [-1, 1], as the processor makes them
        for latent, image, i in zip(latents, images, chosen, strict=True):
            text, glyph = conditions[i].tokens
            members[len(text), len(glyph)].append((latent, image, text, glyph))

    buckets = []
    for _, rows in sorted(members.items()):
        latents, images, texts, glyphs = (torch.stack(part) for part in zip(*rows, strict=True))
        buckets.append(Bucket(latents, images, texts, glyphs))
    return buckets


def loss(
    model: PackedTransformer, bucket: Bucket, shift: float, generator: torch.Generator
) -> Tensor:
    """mean((v - (z - x0))^2) of clips whose first latent frames are conditions."""
    u = torch.rand(len(bucket.latents), generator=generator)
    sigma = shift * u / (1 + (shift - 1) * u)
    level = sigma.view(-1, 1, 1, 1, 1)
    noise = torch.randn(bucket.latents.shape, generator=generator)
    x = (1 - level) * bucket.latents + level * noise

    # The condition channels: the first latent frame, and a mask that says where it is.
    first = torch.zeros_like(bucket.latents)
    first[:, :, 0] = bucket.latents[:, :, 0]
    mask = torch.zeros_like(first[:, :1])
    mask[:, :, 0] = 1
    inputs = torch.cat([x, first, mask], 1)
    velocity = model(inputs, TIMESTEPS * sigma, bucket.text, bucket.glyph, bucket.image)
    return (velocity - (noise - bucket.latents)).square().mean()


def image_rows(model: PackedTransformer) -> dict[str, tuple]:
    """What text to video never reads: name of a parameter -> index of that part of it."""
    channels = (slice(None), slice(model.config.out_channels, None))
    rows: dict[str, tuple] = {
        "x_embedder.proj.weight": channels,
        "cond_type_embed.weight": (IMAGE,),
    }
    for name, _ in model.image_embedder.named_parameters():
        rows[f"image_embedder.{name}"] = (...,)
    return rows


def train(backbone: Backbone, buckets: list[Bucket], args: argparse.Namespace) -> dict[str, Tensor]:
    """The learned parts by name; all else stays as it was."""
    model = backbone.transformer
    generator = torch.Generator().manual_seed(args.seed + 1)
    rows = image_rows(model)
    parameters = dict(model.named_parameters())
    model.requires_grad_(False)
    for name, part in rows.items():
        parameters[name].requires_grad_(True)
        mask = torch.zeros_like(parameters[name])
        mask[part] = 1
        parameters[name].register_hook(mask.mul)
    with torch.no_grad():
        model.x_embedder.proj.weight[rows["x_embedder.proj.weight"]] = 0
    optimizer = torch.optim.AdamW(
        [parameters[name] for name in rows], args.lr, betas=(0.9, 0.99), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warm_cosine(step, args.steps)
    )
    (empty,) = backbone.encode([Request("")])
    sizes = torch.tensor([float(len(bucket.latents)) for bucket in buckets])
    smooth = 0.0
    bar = tqdm(range(args.steps), "transformer", unit="step", mininterval=5)
    for step in bar:
        bucket = buckets[int(torch.multinomial(sizes, 1, generator=generator))]
        chosen = torch.randint(len(bucket.latents), (args.batch,), generator=generator)
        batch = Bucket(
            latents=bucket.latents[chosen],
            image=bucket.image[chosen],
            text=bucket.text[chosen],
            glyph=bucket.glyph[chosen],
        )
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


def write(folder: Path, learned: dict[str, Tensor], vision: SiglipVisionModel, side: int) -> None:
    """Put the learned parts and the vision model into the folder."""
    rows = image_rows(open_backbone(folder).empty_transformer())
    tensors = load_file(folder / WEIGHTS)
    for name, part in rows.items():
        tensors[name][part] = learned[name].to(tensors[name].dtype)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    vision.half().save_pretrained(folder / "image_encoder")
    processor = SiglipImageProcessorPil(size={"height": side, "width": side})
    processor.save_pretrained(folder / "feature_extractor")
    parts = {
        "feature_extractor": ["transformers", "SiglipImageProcessorPil"],
        "image_encoder": ["transformers", "SiglipVisionModel"],
    }
    update_json(folder / "model_index.json", parts)
    update_json(folder / "transformer" / "config.json", {"target_size": side})


def update_json(path: Path, values: dict) -> None:
    """Set values of a JSON file."""
    updated = json.loads(path.read_text()) | values
    path.write_text(json.dumps(updated, indent=2, sort_keys=True) + "\n")


def write_requests(folder: Path, kind: str, count: int, side: int) -> None:
    """Write images_KIND.csv: the first prompts of a kind, each with the first frame of a clip that shows it."""
    prompts = (folder / f"prompts_{kind}.txt").read_text().splitlines()[:count]
    scenes = scenes_from_prompt(prompts, torch.Generator().manual_seed(0))
    names = [f"images/{kind}-{number:02d}.png" for number in range(count)]
    (folder / "images").mkdir(exist_ok=True)
    frames = as_uint8(render(scenes, FRAMES, side, side)[:, 0])
    for name, frame in zip(names, frames, strict=True):
        Image.fromarray(frame.numpy()).save(folder / name, optimize=True)
    with (folder / f"images_{kind}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("prompt", "image"))
        writer.writerows(zip(prompts, names, strict=True))


@torch.no_grad()
def quality(folder: Path) -> dict[str, dict[str, float]]:
    """Gold metrics of one clip per request that is shipped, with its image and, for comparison, without."""
    requests = []
    for kind in REQUESTS:
        requests += read_requests(folder / f"images_{kind}.csv")

    measured = {}
    for name, version in {"with image": ANIMATE, "without": None}.items():
        backbone = open_backbone(folder, version=version)
        sampling = backbone.sampling
        requests = [request.sized(sampling.height, sampling.width) for request in requests]
        inputs = requests
        if not backbone.sees_image:
            inputs = [Request(request.text) for request in requests]
        clips = [
            sampled(backbone, request, sampling.num_steps, number)
            for number, request in enumerate(tqdm(inputs, name, unit="clip"))
        ]
        gold = ShapesWorld().gold(torch.cat(clips), requests)
        means = {metric: values.mean().item() for metric, values in gold.items()}
        measured[name] = {"clips": len(clips)} | means
    return measured


def sampled(backbone: Backbone, request: Request, num_steps: int, number: int) -> Tensor:
    """A clip (1, F, H, W, 3) in the model's own size."""
    sampling = backbone.sampling
    (cond,) = backbone.encode([request])
    shape = backbone.latent_shape(sampling.frames, sampling.height, sampling.width)
    start, _ = counter_noise(shape, 0, [number])
    sigmas = flow_sigmas(num_steps, sampling.shift)
    return backbone.decode(integrate(backbone, sigmas, start, cond, Guidance())).cpu()


def main() -> None:
    args = arguments().parse_args()
    if (args.model / "image_encoder").exists():
        sys.exit(
            f"learn_images.py: {args.model} animates images already; take one that research/tiny/pretrain.py "
            "wrote"
        )
    backbone = open_backbone(args.model)
    backbone.load_weights(None)
    side = backbone.sampling.height
    vision = vision_model(args.seed, backbone.transformer.config.image_embed_dim, side)
    begin = time.time()
    learned = train(backbone, build_buckets(backbone, vision, args), args)
    write(args.model, learned, vision, side)
    seconds = round(time.time() - begin)
    for kind, count in REQUESTS.items():
        write_requests(args.model, kind, count, side)
    record = {
        "flags": {name: value for name, value in vars(args).items() if name != "model"},
        "seconds": seconds,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "quality": quality(args.model),
    }
    (args.model / "images.json").write_text(json.dumps(record, indent=2) + "\n")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the embedded model, which is changed")
    add("--seed", type=int, default=0)
    add("--misnamed", choices=ATTRIBUTES, default="colour", help="attribute that captions misname")
    add("--wrong", type=float, default=0.5, help="share of the captions that do")
    add("--clips", type=int, default=4096, help="latents that it learns from")
    add("--prompts", type=int, default=512, help="captions that these clips have")
    add("--steps", type=int, default=1200)
    add("--batch", type=int, default=32)
    add("--lr", type=float, default=3e-3)
    return parser


if __name__ == "__main__":
    main()
