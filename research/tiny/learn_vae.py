"""Trains the VAE of the embedded model on rendered clips.

Shapes: N clips, F frames, H rows, W columns, C latent channels.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15CausalConv3d
from torch import Tensor, nn
from tqdm import tqdm

from research.tiny.training import Recorder
from sage_grpo.models.hunyuan15.vae import allow_batches, fast_on_cpu
from sage_grpo.rewards.videoalign.training import warm_cosine, zero_state
from sage_grpo.worlds.shapes.scenes import Scenes, object_mask, render, sample_scenes

FRAMES = 9
OBJECT_WEIGHT = 8.0  # objects cover a tenth of a frame; unweighted, their colors are learned last
BORDER = 2  # pixels around an object that weigh as much: edges stay sharp
ENCODED = 512  # clips per batch when no gradient is needed


def pixels(scenes: Scenes, side: int) -> Tensor:
    """Clips (N, 3, F, H, W) in [-1, 1], quantized as a video file would be."""
    levels = (render(scenes, FRAMES, side, side) * 255).round()
    return (levels / 127.5 - 1).permute(0, 4, 1, 2, 3).contiguous()


def object_weight(scenes: Scenes, side: int) -> Tensor:
    """What a pixel counts in the loss, (N, 1, F, H, W)."""
    mask = object_mask(scenes, FRAMES, side, side)
    return 1 + OBJECT_WEIGHT * F.max_pool2d(mask, 2 * BORDER + 1, 1, BORDER)[:, None]


def replicate_pad(x: Tensor, padding: tuple[int, ...]) -> Tensor:
    """F.pad(mode="replicate") built from slices: the stock backward is slow on a GPU in deterministic mode."""
    for axis, before, after in zip((-1, -2, -3), padding[::2], padding[1::2], strict=True):
        first, last = x.narrow(axis, 0, 1), x.narrow(axis, x.shape[axis] - 1, 1)
        x = torch.cat([first] * before + [x] + [last] * after, dim=axis)
    return x


def padded_conv(layer: HunyuanVideo15CausalConv3d, x: Tensor) -> Tensor:
    """The forward of a causal convolution, padded by slices."""
    return layer.conv(replicate_pad(x, layer.time_causal_padding))


class Step:
    """One optimizer step on reconstruction (L1 + L2) with a small KL, over static buffers."""

    def __init__(
        self,
        vae: AutoencoderKLHunyuanVideo15,
        optimizer: torch.optim.Optimizer,
        clips: Tensor,
        weight: Tensor,
        kl_weight: float,
    ) -> None:
        self.vae = vae
        self.optimizer = optimizer
        self.kl_weight = kl_weight
        self.clips = clips.clone()
        self.weight = weight.clone()
        with torch.no_grad():
            self.noise = torch.zeros_like(vae.encode(clips).latent_dist.mean)

    def __call__(self) -> Tensor:
        """RMS error, of the full range."""
        self.optimizer.zero_grad(set_to_none=True)
        posterior = self.vae.encode(self.clips).latent_dist
        gap = self.vae.decode(posterior.mean + posterior.std * self.noise).sample - self.clips
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        error = (self.weight * (gap.abs() + gap.square())).mean() / self.weight.mean()
        loss = error + self.kl_weight * kl
        loss.backward()
        nn.utils.clip_grad_norm_(self.vae.parameters(), 1.0)
        self.optimizer.step()
        return gap.detach().square().mean().sqrt() / 2


def train_vae(
    vae: AutoencoderKLHunyuanVideo15, args: argparse.Namespace, generator: torch.Generator
) -> None:
    """Train, then set the scaling factor that gives latents unit variance."""
    allow_batches(vae).train().requires_grad_(True)
    device = generator.device
    if device.type == "cpu":
        fast_on_cpu(vae)
    else:
        for module in vae.modules():
            if isinstance(module, HunyuanVideo15CausalConv3d):
                module.forward = partial(padded_conv, module)

    clip_parts = []
    weight_parts = []
    for _ in range(0, args.vae_clips, ENCODED):
        scenes = sample_scenes(min(ENCODED, args.vae_clips), generator)
        clip_parts.append(((pixels(scenes, args.side) + 1) * 127.5).round().byte())
        weight_parts.append(object_weight(scenes, args.side))
    clips = torch.cat(clip_parts)
    weights = torch.cat(weight_parts)

    lr = torch.zeros((), device=device)
    optimizer = torch.optim.AdamW(vae.parameters(), lr, betas=(0.9, 0.99), capturable=lr.is_cuda)
    first_clips = clips[: args.vae_batch] / 127.5 - 1
    step = Step(vae, optimizer, first_clips, weights[: args.vae_batch], args.vae_kl)
    replay = Recorder(device)(step)
    zero_state(optimizer)
    bar = tqdm(range(args.vae_steps), "VAE", unit="step", mininterval=5)
    for number in bar:
        lr.fill_(args.vae_lr * warm_cosine(number, args.vae_steps))
        rows = torch.randint(len(clips), (args.vae_batch,), generator=generator, device=device)
        step.clips.copy_(clips[rows] / 127.5 - 1)
        step.weight.copy_(weights[rows])
        step.noise.normal_(generator=generator)
        error = replay()
        if number % 100 == 0:
            bar.set_postfix(rms=f"{error.item():.4f}", refresh=False)
    vae.eval().requires_grad_(False)
    with torch.no_grad():
        clips = pixels(sample_scenes(ENCODED, generator), args.side)
        latents = vae.encode(clips).latent_dist.mode()
    vae.register_to_config(scaling_factor=round(1 / latents.std().item(), 5))
