"""HunyuanVideo-1.5 text to video as a policy, from a folder in the layout of diffusers or of Tencent.

Shapes: B clips of one prompt, F frames of (Y, X) pixels, C latent channels, (T, y, x) latent frames, rows, columns.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15, ModelMixin
from torch import Tensor

from sage_grpo import manifest
from sage_grpo.models.layout import DEFAULT_VERSION, check_folder, part_config, sampling_defaults
from sage_grpo.models.lora import LORA_FILE, read_adapter
from sage_grpo.models.packed import PackedTransformer
from sage_grpo.models.policy import BrokenClip, Conditioning
from sage_grpo.models.text import PromptEncoder
from sage_grpo.models.vae import allow_batches
from sage_grpo.models.weights import fill_model, load_model, open_file, open_folder, open_weights

TIMESTEPS = 1000  # the model's timestep is TIMESTEPS * sigma
DECODED = 512  # latent places that are decoded together: small clips in batches, which is faster, large ones alone


class Hunyuan15:
    """The policy of `policy.py` on `PackedTransformer` and the stock VAE and text encoders.

    Each part is loaded when it is first used. `dtype` is the precision of the computation; latents and velocities
    are fp32 whatever it is (fp64 with an fp64 model).
    """

    def __init__(
        self,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        cache_dir: str | Path | None = None,
        version: str = DEFAULT_VERSION,
    ) -> None:
        """cache_dir: keeps prompt embeddings between runs. version: a folder in `transformer/` of Tencent's layout."""
        self.folder, self.device, self.dtype, self.version = Path(folder), torch.device(device), dtype, version
        check_folder(self.folder, version)
        self.sampling = sampling_defaults(self.folder, version)
        self.prompt_encoder = PromptEncoder(
            self.folder, self.device, dtype, None if cache_dir is None else Path(cache_dir), version
        )

    @cached_property
    def transformer(self) -> PackedTransformer:
        """The denoiser, in evaluation mode: it has no dropout, and rollout and training must agree."""
        return self._load("transformer", PackedTransformer)

    def empty_transformer(self) -> PackedTransformer:
        """The denoiser without memory for its weights, to be given adapters or sharded before it is filled."""
        return self._empty("transformer", PackedTransformer)

    def fill_transformer(self, model: PackedTransformer, checkpoint: Path | None = None) -> None:
        """Give such a model its memory and its weights, of which each rank reads its own part, and use it.

        checkpoint: of a run that trained all weights, which are taken instead.
        """
        model.to_empty(device=self.device)
        own = open_weights(self.folder, "transformer", self.version)
        fill_model(model, own if checkpoint is None else open_folder(checkpoint / "transformer"))
        self.transformer = model

    @cached_property
    def vae(self) -> AutoencoderKLHunyuanVideo15:
        """The autoencoder, frozen; clips above 256 pixels go through it in tiles."""
        model = self._load("vae", AutoencoderKLHunyuanVideo15)
        model.enable_tiling()
        return allow_batches(model).requires_grad_(False)

    def _empty(self, part: str, kind: type[ModelMixin]) -> ModelMixin:
        with torch.device("meta"):
            return kind.from_config(part_config(self.folder, part, self.version)).eval()

    def _load(self, part: str, kind: type[ModelMixin]) -> ModelMixin:
        weights = open_weights(self.folder, part, self.version)
        return load_model(self._empty(part, kind), weights, self.device, self.dtype)

    def load_weights(self, path: str | Path) -> None:
        """Put post-trained weights into the transformer: a folder with `transformer/`, a LoRA folder, or a file."""
        path = Path(path)
        check_exported(path)
        if (path / LORA_FILE).is_file():
            return self._load_lora(path / LORA_FILE)
        single = path.suffix == ".safetensors" and path.is_file()
        if not single and not any((path / "transformer").glob("*.safetensors")):
            raise FileNotFoundError(f"checkpoint_path {path} has neither transformer/*.safetensors nor {LORA_FILE}")
        weights = open_file(path) if single else open_folder(path / "transformer")
        if any("lora_" in name for name in weights.names):
            raise ValueError(f"checkpoint_path {path} is a LoRA, which is loaded from a folder with {LORA_FILE}")
        fill_model(self.transformer, weights)

    def _load_lora(self, file: Path) -> None:
        """diffusers skips what it does not find, silently."""
        tensors, settings = read_adapter(file)
        self.transformer.load_lora_adapter(tensors, prefix=None, metadata=settings)
        loaded = sum("lora_" in name for name in self.transformer.state_dict())
        if loaded != len(tensors):
            raise ValueError(f"{file} holds {len(tensors)} LoRA tensors, of which this transformer took {loaded}")

    def encode(self, prompts: Sequence[str]) -> list[Conditioning]:
        """One conditioning per prompt, each encoded once; the empty prompt is the negative of guidance."""
        return self.prompt_encoder(prompts)

    def release_text_encoders(self) -> None:
        """Give the text encoders' memory back; `encode` loads them again for a prompt that it has not seen."""
        self.prompt_encoder.release()

    def velocity(
        self,
        x: Tensor,
        sigma: Tensor | float,
        cond: Conditioning,
        guidance: float = 1.0,
        negative: Conditioning | None = None,
    ) -> Tensor:
        """`v_neg + guidance * (v_pos - v_neg)`, shape of x (B, C, T, y, x), fp32; at guidance 1 only v_pos is run.

        sigma: one number for all clips, or (B,). Both branches carry gradients.
        """
        positive = self._branch(x, sigma, cond)
        if math.isclose(guidance, 1.0):
            return positive
        if negative is None:
            raise ValueError(f"guidance {guidance} needs a negative conditioning; encode the negative prompt ('').")
        unguided = self._branch(x, sigma, negative)
        return unguided + guidance * (positive - unguided)

    def _branch(self, x: Tensor, sigma: Tensor | float, cond: Conditioning) -> Tensor:
        """Velocity under one conditioning. Text to video: the condition latents and their mask are zero channels."""
        cond = cond.to(x.device, self.dtype)
        batch, channels, *grid = x.shape
        blank = x.new_zeros(batch, self.transformer.config.in_channels - channels, *grid, dtype=self.dtype)
        timestep = TIMESTEPS * torch.as_tensor(sigma, dtype=torch.float32, device=x.device).reshape(-1)
        velocity = self.transformer(
            torch.cat([x.to(self.dtype), blank], dim=1), timestep, cond.text[None], cond.glyph[None]
        )
        return _at_least_fp32(velocity)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, C, T, y, x) -> uint8 clips (B, F, Y, X, 3). The only place where latents are un-scaled.

        BrokenClip if pixels of any of them are not finite.
        """
        together = max(1, DECODED // latents[0, 0].numel())
        return torch.cat([self._decode(part) for part in latents.split(together)])

    def _decode(self, latents: Tensor) -> Tensor:
        unscaled = latents.to(self.vae.device, self.dtype) / self.vae.config.scaling_factor
        pixels = _at_least_fp32(self.vae.decode(unscaled, return_dict=False)[0])
        if not pixels.isfinite().all():  # a cast to uint8 would make black pixels of them, and a reward a number
            raise BrokenClip("a decoded clip has pixels that are not finite: the latents or the weights are broken")
        return ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 4, 1)

    @torch.no_grad()
    def encode_video(self, clips: Tensor) -> Tensor:
        """uint8 clips (B, F, Y, X, 3) -> scaled latents (B, C, T, y, x), the posterior's mode, fp32."""
        self.latent_shape(*clips.shape[1:4])
        return torch.cat([self._encode_one(clip) for clip in clips.split(1)])

    def _encode_one(self, clip: Tensor) -> Tensor:
        pixels = clip.to(self.vae.device).permute(0, 4, 1, 2, 3) / 127.5 - 1
        mode = self.vae.encode(pixels.to(self.dtype)).latent_dist.mode()
        return _at_least_fp32(mode) * self.vae.config.scaling_factor

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, T, y, x) of one clip; sizes that the VAE cannot hold are refused."""
        temporal, spatial = self.vae.temporal_compression_ratio, self.vae.spatial_compression_ratio
        if frames < 1 or (frames - 1) % temporal:
            nearest = max(0, round((frames - 1) / temporal)) * temporal + 1
            raise ValueError(f"num_frames {frames} is not {temporal}n + 1; the nearest is {nearest}.")
        for name, size in (("height", height), ("width", width)):
            if size < spatial or size % spatial:
                raise ValueError(f"{name} {size} is not a multiple of {spatial}, the VAE's spatial compression.")
        channels = self.vae.config.latent_channels
        return channels, (frames - 1) // temporal + 1, height // spatial, width // spatial


def _at_least_fp32(tensor: Tensor) -> Tensor:
    """Half precision to fp32; fp64 stays, for tests that compare exactly."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def check_exported(checkpoint: Path) -> None:
    """Refuse a run's checkpoint whose weights are not as they were written."""
    if (checkpoint / manifest.NAME).is_file():
        manifest.check(checkpoint, "transformer/" if (checkpoint / "transformer").is_dir() else LORA_FILE)
