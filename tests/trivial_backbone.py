"""A second backbone with the minimum the interface requires: its latents are pixels, its text encoder is a hash."""

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sage_grpo.models.backbone import Backbone, Sampling
from sage_grpo.models.cost import Architecture
from sage_grpo.models.denoiser import Denoiser
from sage_grpo.models.embeddings import Conditioning
from sage_grpo.models.weights import open_folder


@dataclass(frozen=True)
class Hashed(Conditioning):
    number: Tensor  # (1,)


class HashEncoder:
    kind = Hashed
    encode = staticmethod(
        lambda request: Hashed(torch.tensor([zlib.crc32(request.text.encode()) / 2**32]))
    )
    release = staticmethod(lambda: None)
    identity = staticmethod(lambda: "crc32")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.mix(x))


class TinyDenoiser(nn.Module, Denoiser):
    block_list = "layers"

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(5, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x, sigma, number):
        """x (B, T, y, x, 3); sigma and number (B, 1, 1, 1, 1), or 1 instead of B."""
        shape = (*x.shape[:4], 1)
        x = self.enter(torch.cat([x, sigma.expand(shape), number.expand(shape)], -1))
        for block in self.all_blocks:
            x = self.run_block(block, (x,))
        return self.leave(x).clone()  # FSDP warns of views


class Trivial(Backbone):
    sampling = Sampling(frames=5, height=16, width=16, fps=8, shift=3.0, guidance=2.0, num_steps=3)
    lora_targets, multiple = ("mix",), 1

    def encoder(self):
        return HashEncoder()

    def branch(self, x, sigma, cond):
        sigma = torch.as_tensor(sigma, dtype=x.dtype, device=x.device).reshape(-1, 1, 1, 1, 1)
        number = cond.number.to(x).reshape(-1, 1, 1, 1, 1)
        return self.transformer(x.movedim(1, -1), sigma, number).movedim(-1, 1)

    def decode(self, latents):
        return ((latents.movedim(1, -1) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)

    def encode_video(self, clips):
        return clips.movedim(-1, 1) / 127.5 - 1

    def latent_shape(self, frames, height, width):
        return 3, frames, height, width

    def empty_transformer(self):
        with torch.device("meta"):
            return TinyDenoiser()

    def open_weights(self):
        return open_folder(self.folder / "transformer")

    def architecture(self):
        return Architecture(
            2, heads=1, width=8, mlp_ratio=0, parameters=219, block=72, vae=0, temporal=1, spatial=1
        )
