"""Train the embedded model: a tiny HunyuanVideo-1.5 on the moving-shapes world, saved in the diffusers layout.

    python -m research.tiny.pretrain --output assets/tiny           (one GPU, minutes; fully determined by --seed)

First trains the VAE on rendered clips, then the transformer by flow matching on VAE latents with captions, a tenth of
them dropped for guidance. The learning rate is constant and the weights are averaged, so a shorter run is a prefix of
a longer one: `--snapshots` saves the averaged weights at several steps, to choose how much is left for RL to learn.
Each folder gets a contact sheet of samples, samples.png.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# cuBLAS is deterministic only with a fixed workspace.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import diffusers
import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Pipeline
from torch import Tensor, nn
from tqdm import tqdm

from research.tiny.learn_vae import ENCODED, FRAMES, pixels, train_vae
from research.tiny.quality import random_prompts, sample_clips
from research.tiny.tiny import TinyConfig, build_tiny
from research.tiny.training import Recorder
from sage_grpo.algo.sde import build_schedule, flow_sigmas
from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Sampling
from sage_grpo.models.embeddings import Embeddings
from sage_grpo.models.hunyuan15.folder import ModelFolder
from sage_grpo.models.hunyuan15.text import TextConditioning, TextEncoder
from sage_grpo.models.hunyuan15.transformer import PackedTransformer
from sage_grpo.models.latent import TIMESTEPS
from sage_grpo.models.registry import open_backbone
from sage_grpo.rewards.videoalign.training import zero_state
from sage_grpo.runs.media import contact_sheet, thumbnails
from sage_grpo.worlds.shapes.scenes import (
    ATTRIBUTES,
    Scenes,
    captions,
    sample_scenes,
    scenes_from_prompt,
    vocabulary,
)

CAPTION_DROP = 0.1
PROMPTS = {"train": 512, "valid": 64}  # full captions shipped with the folder, none in both
EMA_DECAY = 0.99  # of an average that is updated every EMA_EVERY steps: over about 2000 steps
EMA_EVERY = 20
SHEET = {"prompts": 8, "steps": 10}  # contents of samples.png: a few seconds on a CPU


@dataclass
class Bucket:
    """Latents whose captions have equal lengths, so that a batch needs no padding."""

    latents: Tensor  # (N, C, T, y, x)
    text: Tensor  # (N, L, text_dim)
    glyph: Tensor  # (N, M, glyph_dim)


@torch.no_grad()
def build_buckets(
    vae: AutoencoderKLHunyuanVideo15,
    embeddings: Embeddings,
    args: argparse.Namespace,
    generator: torch.Generator,
) -> list[Bucket]:
    """`--clips` latents, each with one of `--prompts` captions, grouped by caption length.

    A clip shows what its caption says, but for the `--misnamed` attribute: a share of the clips shows another class.
    """
    device = generator.device
    sentences = captions(sample_scenes(args.prompts, generator), generator)
    requests = [Request(text) for text in sentences]
    conditions = embeddings(tqdm(requests, "captions", unit="caption", mininterval=5))
    members: dict[tuple[int, int], list[tuple[Tensor, TextConditioning]]] = defaultdict(list)
    for _ in tqdm(range(args.clips // ENCODED), "latents", unit="batch", mininterval=5):
        drawn = torch.randint(args.prompts, (ENCODED,), generator=generator, device=device)
        chosen = drawn.tolist()
        scenes = scenes_from_prompt([sentences[i] for i in chosen], generator)
        clips = pixels(misnamed(scenes, args, generator), args.side)
        latents = vae.encode(clips).latent_dist.mode() * vae.config.scaling_factor
        for latent, i in zip(latents, chosen, strict=True):
            cond = conditions[i]
            lengths = (len(cond.text), len(cond.glyph))
            members[lengths].append((latent, cond.to(latent.device)))

    buckets = []
    for _, rows in sorted(members.items()):
        latents, conds = zip(*rows, strict=True)
        text = torch.stack([cond.text for cond in conds])
        glyph = torch.stack([cond.glyph for cond in conds])
        buckets.append(Bucket(torch.stack(latents), text, glyph))
    return buckets


def misnamed(scenes: Scenes, args: argparse.Namespace, generator: torch.Generator) -> Scenes:
    """The scenes, a share `--wrong` of them with another class of the attribute `--misnamed`: a habit to unlearn."""
    if not args.wrong:
        return scenes
    named = getattr(scenes, args.misnamed)
    count = len(ATTRIBUTES[args.misnamed])
    draw = {"size": (len(scenes),), "generator": generator, "device": generator.device}
    other = (named + torch.randint(1, count, **draw)) % count
    shown = torch.where(torch.rand(**draw) < args.wrong, other, named)
    return replace(scenes, **{args.misnamed: shown})


class FlowMatching:
    """One optimizer step on mean((v - (z - x0))^2), over static buffers."""

    def __init__(
        self,
        model: PackedTransformer,
        optimizer: torch.optim.Optimizer,
        batch: int,
        like: Bucket,
        recorder: Recorder,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.latents = torch.zeros_like(like.latents[:1]).repeat(batch, 1, 1, 1, 1)
        self.noise = torch.zeros_like(self.latents)
        self.text = like.text[:1].repeat(batch, 1, 1)
        self.glyph = like.glyph[:1].repeat(batch, 1, 1)
        self.sigma = torch.full((batch,), 0.5, device=self.latents.device)
        self.replay = recorder(self._step)

    def __call__(
        self, latents: Tensor, text: Tensor, glyph: Tensor, shift: float, generator: torch.Generator
    ) -> Tensor:
        """Train on a batch with noise levels distributed as in the sampler; returns the loss."""
        u = torch.rand(len(latents), generator=generator, device=latents.device)
        self.sigma.copy_(shift * u / (1 + (shift - 1) * u))
        self.noise.normal_(generator=generator)
        self.latents.copy_(latents)
        self.text.copy_(text)
        self.glyph.copy_(glyph)
        return self.replay()

    def _step(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        level = self.sigma.view(-1, 1, 1, 1, 1)
        x = (1 - level) * self.latents + level * self.noise
        blank = x.new_zeros(len(x), self.model.config.in_channels - x.shape[1], *x.shape[2:])
        inputs = torch.cat([x, blank], 1)
        velocity = self.model(inputs, TIMESTEPS * self.sigma, self.text, self.glyph)
        loss = (velocity - (self.noise - self.latents)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()


def train_transformer(
    model: PackedTransformer,
    buckets: list[Bucket],
    empty: Bucket,
    args: argparse.Namespace,
    generator: torch.Generator,
    save: Callable[[int, dict[str, Tensor]], None],
) -> None:
    """Train by flow matching; averaged weights are saved at each of `--snapshots` and at the end."""
    model.train()
    sizes = torch.tensor([float(len(bucket.latents)) for bucket in buckets])
    device = generator.device
    lr = torch.zeros((), device=device)
    # those of text to video
    parameters = [
        parameter
        for name, parameter in model.named_parameters()
        if not name.startswith("image_embedder")
    ]
    optimizer = torch.optim.AdamW(
        parameters, lr, betas=(0.9, 0.99), weight_decay=0.01, capturable=lr.is_cuda
    )
    recorder = Recorder(lr.device)
    trainers = [FlowMatching(model, optimizer, args.batch, bucket, recorder) for bucket in buckets]
    trainer_without_caption = FlowMatching(model, optimizer, args.batch, empty, recorder)
    zero_state(optimizer)
    weights = model.state_dict()
    average = {name: value.clone() for name, value in weights.items()}
    # on the CPU, so that choosing a bucket needs no GPU sync
    choice = torch.Generator().manual_seed(args.seed)
    bar = tqdm(range(1, args.steps + 1), "transformer", unit="step", mininterval=5)
    for step in bar:
        lr.fill_(args.lr * min(1.0, step / 200))
        drawn = torch.multinomial(sizes, 1, generator=choice).item()
        bucket = buckets[drawn]
        rows = torch.randint(len(bucket.latents), (args.batch,), generator=generator, device=device)
        latents = bucket.latents[rows]
        # Captions are dropped for a full batch: all of its captions have one length.
        if torch.rand((), generator=choice) < CAPTION_DROP:
            loss = trainer_without_caption(latents, empty.text, empty.glyph, args.shift, generator)
        else:
            text, glyph = bucket.text[rows], bucket.glyph[rows]
            loss = trainers[drawn](latents, text, glyph, args.shift, generator)
        if step % EMA_EVERY == 0:
            change = 1 - min(EMA_DECAY, step / (step + 100))
            torch._foreach_lerp_(list(average.values()), list(weights.values()), change)
        if step % 100 == 0:
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
        if step in args.snapshots or step == args.steps:
            save(step, average)


def main() -> None:
    args = arguments().parse_args()
    if args.clips < ENCODED or args.clips % ENCODED:
        sys.exit(f"--clips is {args.clips}; it must be a multiple of {ENCODED}")
    if any(step > args.steps for step in args.snapshots):
        sys.exit(f"--snapshots are {args.snapshots}; none may lie beyond --steps {args.steps}")
    begin = time.time()
    device = torch.device(args.device)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = True
    # It would only cost time: every tensor here is written.
    torch.utils.deterministic.fill_uninitialized_memory = False
    generator = torch.Generator(device).manual_seed(args.seed)
    sizes = TinyConfig(
        heads=args.heads,
        rope=tuple(args.rope),
        layers=args.layers,
        vae_channels=tuple(args.vae_channels),
        vae_layers=args.vae_layers,
        latent_channels=args.latents,
        shift=args.shift,
        guidance=args.guidance,
    )
    pipe = build_tiny(args.seed, vocabulary(), sizes)
    sampling = Sampling(
        frames=FRAMES,
        height=args.side,
        width=args.side,
        fps=8,
        shift=args.shift,
        guidance=args.guidance,
        num_steps=20,
    )

    if args.vae_from:
        pipe.vae = open_backbone(args.vae_from, device).vae
    else:
        train_vae(pipe.vae.to(device), args, generator)
    vae_seconds = time.time() - begin
    with tempfile.TemporaryDirectory() as folder:  # --output appears only with trained weights
        write(pipe, Path(folder), sampling)
        cpu = torch.device("cpu")  # faster for such small encoders
        embeddings = Embeddings(TextEncoder(ModelFolder(Path(folder)), cpu, torch.float32), cpu)
        buckets = build_buckets(pipe.vae, embeddings, args, generator)
        (no_caption,) = embeddings([Request("")])
    empty = Bucket(
        latents=buckets[0].latents,
        text=no_caption.text[None].to(device),
        glyph=no_caption.glyph[None].to(device),
    )
    model = PackedTransformer(**dict(pipe.transformer.config)).to(device)
    model.load_state_dict(pipe.transformer.state_dict())

    def save(step: int, weights: dict[str, Tensor]) -> None:
        pipe.transformer.load_state_dict(weights)
        suffix = "" if step == args.steps else f"-{step}"
        folder = args.output.with_name(args.output.name + suffix)
        write(pipe, folder, sampling)
        result = {
            "vae_seconds": round(vae_seconds),
            "seconds": round(time.time() - begin),
            "steps": step,
        }
        describe(folder, args, result, device)
        draw_samples(folder)

    train_transformer(model, buckets, empty, args, generator, save)


def write(pipe: HunyuanVideo15Pipeline, output: Path, sampling: Sampling) -> None:
    """Write the folder in half precision, with its sampling settings, its world, and prompts of that world.

    One matrix of the glyph projection, whose width of 2048 is fixed in the stock class, is half of all weights. It gets
    8 bits.
    """
    parts = (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2)
    for part in parts:
        part.half()
    matrix = pipe.transformer.context_embedder_2.linear_2.weight
    matrix.data = matrix.data.to(torch.float8_e4m3fn)
    pipe.save_pretrained(output)
    for part in parts:
        part.float()
    sampling.to_json(output / "sampling.json")
    (output / "world.json").write_text(json.dumps({"world": "shapes"}, indent=2) + "\n")
    prompts = random_prompts(PROMPTS["train"] + PROMPTS["valid"], seed=0)
    valid, train = prompts[: PROMPTS["valid"]], prompts[PROMPTS["valid"] :]
    (output / "prompts_valid.txt").write_text("\n".join(valid) + "\n")
    (output / "prompts_train.txt").write_text("\n".join(train) + "\n")


def describe(
    output: Path, args: argparse.Namespace, result: dict[str, Any], device: torch.device
) -> None:
    """Write training.json: how the folder was made; `research/tiny/card.py` turns it into the model card."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    flags = vars(args).copy()
    for flag in ("output", "device", "snapshots", "steps"):
        del flags[flag]
    command = f"python -m research.tiny.pretrain --output assets/tiny --steps {result['steps']}"
    for flag, value in flags.items():
        if value != arguments().get_default(flag):
            text = " ".join(map(str, value)) if isinstance(value, list) else value
            command += f" --{flag} {text}"
    if args.vae_from:
        other = json.loads((args.vae_from / "training.json").read_text())
        result["vae_seconds"] = other["vae_seconds"]
        result["vae_command"] = other["command"]
    record = {
        "command": command,
        "flags": {flag: str(value) for flag, value in flags.items()},
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        **result,
    }
    (output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"wrote {output} after {result['seconds']} s on {name}")


def draw_samples(folder: Path) -> None:
    """Write samples.png: clips of the first validation prompts.

    Runs on the CPU, apart from the GPU's recorded steps; its noise is counter-based, so training draws the same numbers
    with or without it.
    """
    backbone = open_backbone(folder)
    sampling = backbone.sampling
    prompts = (folder / "prompts_valid.txt").read_text().splitlines()[: SHEET["prompts"]]
    schedule = build_schedule("ode", flow_sigmas(SHEET["steps"], sampling.shift), 0.0)
    clips = torch.cat(list(sample_clips(backbone, schedule, prompts, 1, sampling.guidance)))
    contact_sheet(folder / "samples.png", [thumbnails(clip) for clip in clips], prompts)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("outputs/tiny"), help="folder to write")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")

    # sizes
    add("--heads", type=int, default=6, help="attention heads of the transformer")
    add(
        "--rope",
        type=int,
        nargs=3,
        default=(8, 8, 8),
        help="channels of a head for time, row, column",
    )
    add("--layers", type=int, default=4, help="blocks of the transformer")
    add("--shift", type=float, default=3.0, help="timestep shift of the sampler")
    add("--guidance", type=float, default=1.0, help="default guidance of the sampler")
    add("--side", type=int, default=48, help="height and width of a clip in pixels")
    add("--vae_channels", type=int, nargs="+", default=(16, 32, 64, 64),
        help="channels of the VAE's blocks; each after the first halves height and width")  # fmt: skip
    add("--vae_layers", type=int, default=1, help="layers per VAE block")
    add("--latents", type=int, default=32, help="channels of a latent")

    # what captions say wrongly
    add("--misnamed", choices=ATTRIBUTES, default="colour", help="attribute that captions misname")
    add("--wrong", type=float, default=0.5, help="share of the captions that do")

    # the VAE
    add("--vae_from", type=Path, help="take the VAE of this model folder instead of training one")
    add("--vae_clips", type=int, default=16384, help="rendered clips that the VAE learns from")
    add("--vae_kl", type=float, default=1e-5, help="KL weight, keeps latents near a unit Gaussian")
    add("--vae_steps", type=int, default=3092)
    add("--vae_batch", type=int, default=32)
    add("--vae_lr", type=float, default=8e-4)

    # the transformer
    add("--clips", type=int, default=81920, help="latents that the transformer learns from")
    add("--prompts", type=int, default=2048, help="captions that these clips have")
    add("--steps", type=int, default=20000)
    add("--batch", type=int, default=64)
    add("--lr", type=float, default=7e-4)
    add("--snapshots", type=int, nargs="*", default=[], help="steps at which to save as well")
    return parser


if __name__ == "__main__":
    main()
