"""The interface that the trainer, the tools and `generate.py` need from a video model, and nothing more.

A backbone has two halves. `Backbone` wraps a model folder: it encodes requests, predicts velocities, decodes and
encodes clips, loads and exports weights. Its `Denoiser` is the trained module: the blocks that are sharded,
recomputed, compiled and adapted, and the layers that are never trained.

To add a backbone, write a `Backbone` subclass and add a row to BACKBONES (docs/extending.md).

Shapes: B clips of one request, F frames of (Y, X) pixels, C latent channels, (T, y, x) latent frames, rows, columns.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from sage_grpo.data.requests import Request
from sage_grpo.files import manifest
from sage_grpo.files.json_files import check_kinds, naming, read_object, write_json
from sage_grpo.files.tensor_files import TensorFile, host_copy
from sage_grpo.models.cost import Architecture
from sage_grpo.models.denoiser import TRANSFORMER, Denoiser
from sage_grpo.models.embeddings import Conditioning, Embeddings, Encoder
from sage_grpo.models.lora import (
    LORA_FILE,
    adapter_files,
    read_adapter,
    saved_adapters,
)
from sage_grpo.models.shards import rank_file, trained_weights
from sage_grpo.models.versions import refused_for_one_transformer
from sage_grpo.models.weights import (
    INDEX,
    Weights,
    fill_model,
    index_text,
    load_model,
    open_file,
    plan_files,
)
from sage_grpo.parallel.fsdp import full_tensor


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance; at scale 1 it is off, and the negative conditioning is not used."""

    scale: float = 1.0
    negative: Conditioning | None = None
    interval: tuple[float, float] = (0.0, 1.0)  # noise levels at which it is on (arXiv 2404.07724)
    # of the second transformer, in a model that has two; None: as `scale`
    scale_2: float | None = None

    @property
    def second(self) -> "Guidance":
        """The guidance of the second transformer."""
        return self if self.scale_2 is None else replace(self, scale=self.scale_2)

    def at(self, sigma: float) -> "Guidance":
        """The guidance of a step from noise level `sigma`: this one, or none outside the interval."""
        low, high = self.interval
        return self if low <= sigma <= high else Guidance()


@dataclass(frozen=True)
class Sampling:
    """How a model is meant to be sampled: clip size, frames per second and ODE settings."""

    frames: int
    height: int  # pixels
    width: int  # pixels
    fps: int
    shift: float  # of the noise levels
    guidance: float
    num_steps: int
    # of the second transformer, in a model that has two; None: as `guidance`
    guidance_2: float | None = None

    def __str__(self) -> str:
        clip = f"{self.frames} frames of {self.height} x {self.width}"
        guidance = f"{self.guidance:g}"
        if self.guidance_2 is not None:
            guidance += f" and {self.guidance_2:g}"
        return f"{clip}, {self.num_steps} steps, shift {self.shift:g}, guidance {guidance}"

    @classmethod
    def from_json(cls, path: Path) -> "Sampling":
        """Read a `sampling.json`; missing keys, unknown keys and values other than positive numbers are errors."""
        values = read_object(path)
        kinds = {field.name: field.type for field in fields(cls) if field.name != "guidance_2"}
        if "guidance_2" in values:
            kinds["guidance_2"] = float
        if sorted(values) != sorted(kinds):
            raise ValueError(f"{path} has keys {sorted(values)}; it needs exactly {sorted(kinds)}.")
        check_kinds(path, values, kinds)
        return cls(**values)

    def to_json(self, path: Path) -> None:
        """Write what `from_json` reads."""
        write_json(path, {name: value for name, value in asdict(self).items() if value is not None})


@dataclass(frozen=True)
class Origin:
    """The published model that weights derive from, as model cards on the Hugging Face Hub name it."""

    base_model: str = ""  # repository
    license: str = ""  # identifier; `other` if the Hub knows none, with a name and a link
    license_name: str = ""
    license_link: str = ""


MAX_RESIDENT = 1e8  # bytes of encoders that may stay on a GPU during training: what no plan of memory would notice


class BrokenClip(ValueError):
    """A clip has non-finite pixels: it cannot be shown or scored."""


class Backbone(ABC):
    """A flow model: x = (1 - sigma) x0 + sigma z, velocity v = dx/dsigma.

    Parts are loaded on first use. `dtype` is the compute precision; latents and velocities are always fp32 (fp64 with
    an fp64 model).

    Free elements: a conditioning may fix a part of a clip's latents, such as a clean first frame. Noise, states and
    velocities, and so log-probabilities, KL, targets and all means over elements, have the others alone: the free ones,
    which `free_shape` counts. What is fixed is added by `branch`, for the model to see, and by `full_latents`, before a
    clip is decoded.
    """

    # set by subclasses
    sampling: Sampling  # of generate.py and validation
    max_tokens: float = math.inf  # most text tokens that the model reads
    negative_prompt = ""  # default for guidance
    sees_image = False  # whether every clip begins with the image of its request
    lora_targets: tuple[str, ...]  # linear layers of a block that get an adapter by default
    # Folders of the transformers; of two, the first works at noise levels from `boundary` on, the second below.
    experts: tuple[str, ...] = (TRANSFORMER,)
    boundary = 0.0
    origin = Origin()  # of the weights; empty if unknown

    # may be set after construction
    decode_gb = 0.0  # GB; clips whose decoding needs more memory are tiled
    compiled = False  # whether the decoder is compiled

    def __init__(
        self,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        cache_dir: str | Path | None = None,
        version: str | None = None,
    ) -> None:
        """cache_dir: keeps embeddings between runs. version: selects a transformer if the folder has several."""
        self.folder = Path(folder)
        self.device = torch.device(device)
        self.dtype = dtype
        self.cache_dir = cache_dir
        self.version = version

    def check(self) -> None:  # noqa: B027 - not every layout has something to check
        """Reject an incomplete folder before anything is loaded."""

    # requests

    def check_requests(self, requests: Sequence[Request]) -> None:
        """Reject requests without the image that the model animates, or with one that it would not see."""
        for request in requests:
            prompt = f"the prompt {request.text[:80]!r}"
            if self.sees_image and request.image is None:
                raise ValueError(
                    f"{self.folder} animates images; give generate.py an --image, or the prompt file a column "
                    f"`image`, for {prompt}"
                )
            if not self.sees_image and request.image is not None:
                remedy = f"remove the image from {prompt}"
                if self.image_versions:
                    remedy += f", or animate it by --pretrained_transformer_version {self.image_versions[0]}"
                raise ValueError(f"{self.folder} is a text-to-video model; {remedy}")

    def check_second_guidance(self, scale_2: float | None) -> None:
        """Reject the flag guidance_scale_2 for a model without a second transformer."""
        if scale_2 is not None and len(self.experts) == 1:
            raise ValueError(refused_for_one_transformer("guidance_scale_2", scale_2))

    @property
    def image_versions(self) -> list[str]:
        """The values of `pretrained_transformer_version` with which this folder animates images."""
        return []

    def default_size(self, request: Request) -> tuple[int, int]:
        """Height and width of a clip in pixels, where the user chose none."""
        return self.sampling.height, self.sampling.width

    @abstractmethod
    def encoder(self) -> Encoder:
        """The folder's encoders, not yet loaded."""

    @cached_property
    def embeddings(self) -> Embeddings:
        return Embeddings(self.encoder(), self.device, self.cache_dir)

    @property
    def encodes_ahead(self) -> bool:
        """Whether a run encodes all requests before it begins.

        Large encoders on a GPU must leave before the transformer needs their memory, and cannot come back for a prompt
        later; and a cache that others will read has to be complete. Else each request is encoded when it is needed: the
        run begins earlier, and may never reach some.
        """
        must_leave = self.device.type != "cpu" and self.encoder_bytes > MAX_RESIDENT
        return must_leave or self.cache_dir is not None

    @property
    def encoder_bytes(self) -> float:
        """Memory of the encoders while they are loaded; infinite if unknown."""
        return math.inf

    def encode(self, requests: Sequence[Request]) -> list[Conditioning]:
        """One conditioning per request, on the backbone's device, each encoded once."""
        return self.embeddings(requests)

    def prepare(
        self, requests: Sequence[Request], world_rank: int = 0, world_size: int = 1
    ) -> None:
        """Encode all requests that `encode` will need, then free the encoders; all ranks share the work."""
        self.embeddings.prepare(requests, world_rank, world_size)

    def num_tokens(self, cond: Conditioning) -> int:
        """Number of text tokens of a conditioning."""
        return 0

    # sampling

    @property
    def rollout_size(self) -> tuple[int, int, int]:
        """Frames, height and width of a rollout; full-size models roll out smaller clips than they can sample."""
        return self.sampling.frames, self.sampling.height, self.sampling.width

    def free_shape(self, shape: Sequence[int], cond: Conditioning) -> tuple[int, ...]:
        """Shape of the free elements of one clip, of all whose latents have `shape` (C, T, y, x); here all of them."""
        return tuple(shape)

    def full_latents(self, free: Tensor, cond: Conditioning) -> Tensor:
        """The latents (B, C, T, y, x) of clips, from their free elements and what the conditioning fixes."""
        return free

    @abstractmethod
    def branch(self, x: Tensor, sigma: Tensor | float, cond: Conditioning) -> Tensor:
        """Velocity without guidance, at least fp32, for latents x (B, C, T, y, x); sigma is a scalar or (B,).

        Both are of the free elements: T may be less than that of a clip.

        With prompts_per_forward, `cond` may hold several prompts: its tensors then have the B clips as first dim.
        """

    def velocity(
        self, x: Tensor, sigma: Tensor | float, cond: Conditioning, guidance: Guidance
    ) -> Tensor:
        """Guided velocity, shape of x (B, C, T, y, x), at least fp32: `v_neg + scale * (v_pos - v_neg)`.

        Both branches carry gradients, and see the same image if there is one.
        """
        return guided(partial(self.branch, x, sigma), cond, guidance)

    def learns_at(self, sigmas: Tensor, adapted: str = "both") -> Tensor:
        """(n,) bool: whether trained parameters affect the velocity at noise levels `sigmas` (n,).

        Other levels cannot be trained, so no window includes them. adapted: the transformers that are trained, `high`,
        `low` or `both`, in a model that has two.
        """
        return torch.ones_like(sigmas, dtype=torch.bool)

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, C, T, y, x) in the model's scaling -> uint8 clips (B, F, Y, X, 3); may raise BrokenClip."""

    @abstractmethod
    def encode_video(self, clips: Tensor) -> Tensor:
        """uint8 clips (B, F, Y, X, 3) -> latents (B, C, T, y, x) in the model's scaling."""

    @abstractmethod
    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Latent shape (C, T, y, x) of one clip; rejects sizes that the model cannot generate."""

    @property
    @abstractmethod
    def multiple(self) -> int:
        """Clip height and width must be multiples of this many pixels."""

    # weights

    @abstractmethod
    def empty_transformer(self) -> Denoiser:
        """The denoiser on the meta device, so that adapters and sharding can be added before weights are loaded."""

    @abstractmethod
    def open_weights(self) -> Weights:
        """The denoiser weights in the folder."""

    def fingerprint(self) -> str:
        """Identifies the folder's denoiser weights: a hash of all names and shapes, and of three rows per tensor."""
        weights = self.open_weights()
        digest = hashlib.sha256()
        for name in sorted(weights.names):
            shape = weights.shape(name)
            digest.update(f"{name} {shape}".encode())
            num_rows = shape[0] if shape else 0
            if num_rows == 0:
                continue
            for row in sorted({0, num_rows // 2, num_rows - 1}):
                values = weights.read(name, row, row + 1).contiguous()
                digest.update(values.view(torch.uint8).numpy())
        return digest.hexdigest()[:16]

    def fingerprints(self) -> dict[str, str]:
        """Identify what samples depend on besides settings, by name; subclasses add their own parts."""
        return {"base weights": self.fingerprint(), "encoders": self.embeddings.encoder.identity()}

    @cached_property
    def transformer(self) -> Denoiser:
        """The denoiser in eval mode: it has no dropout, and rollout and training must agree."""
        return load_model(self.empty_transformer(), self.open_weights(), self.device, self.dtype)

    def fill_transformer(self, model: Denoiser, checkpoint: Path | None = None) -> None:
        """Allocate an empty model, load its weights (each rank reads only its shard) and use it.

        checkpoint: of a full fine-tuning run, whose weights replace the folder's.
        """
        model.to_empty(device=self.device)
        fill_model(model, self.starting_weights(checkpoint))
        self.transformer = model

    def starting_weights(self, checkpoint: Path | None) -> Weights:
        """The folder's weights, or those of a full fine-tuning run's checkpoint."""
        if checkpoint is None:
            return self.open_weights()
        return trained_weights(checkpoint, self.open_weights, self.experts)

    def load_weights(self, path: str | Path | None) -> None:
        """Use post-trained weights: a folder with `transformer/`, a LoRA folder, or a file; None for the base model."""
        self.__dict__.pop("transformer", None)  # reloaded on next use
        if path is None:
            return
        path = Path(path)
        check_weights(path)
        check_exported(path)

        adapters = saved_adapters(path)
        for expert, file in adapters.items():
            self._load_lora(expert, file)
        if adapters:
            return
        if path.is_file():
            weights = open_file(path)
        else:
            weights = trained_weights(path, self.open_weights, self.experts)

        if any("lora_" in name for name in weights.names):
            raise ValueError(
                f"checkpoint_path {path} is a LoRA, which is loaded from a folder with {LORA_FILE}"
            )
        fill_model(self.transformer, weights)

    def _load_lora(self, expert: str, file: Path) -> None:
        """Load a LoRA file into a transformer. diffusers silently skips tensors that it cannot place, so count them."""
        if expert not in self.experts:
            raise ValueError(f"{file} is of {expert}, which this model does not have")
        transformer = self.transformer.experts[expert]
        tensors, settings = read_adapter(file)
        with naming(file):
            transformer.load_lora_adapter(tensors, prefix=None, metadata=settings)
        adapter = [value for name, value in transformer.named_parameters() if "lora_" in name]
        for parameter in adapter:  # peft puts it where the layer is, which may be in host memory
            parameter.data = parameter.data.to(self.device)
        loaded = len(adapter)
        if loaded != len(tensors):
            raise ValueError(
                f"{file} holds {len(tensors)} LoRA tensors, of which this transformer has a place for {loaded}"
            )

    def exported(
        self, use_lora: bool, world_rank: int = 0, world_size: int = 1
    ) -> dict[str, TensorFile | str]:
        """The trained weights in diffusers layout: this rank's share of the files, copied to the host.

        All ranks must call.
        """
        if use_lora:
            adapters = adapter_files(self.transformer)  # a collective: every rank joins
            return dict(adapters) if world_rank == 0 else {}
        files: dict[str, TensorFile | str] = {}
        for folder, expert in self.transformer.experts.items():
            files |= self._exported_weights(folder, expert, world_rank, world_size)
        return files

    def _exported_weights(
        self, folder: str, transformer: Denoiser, world_rank: int, world_size: int
    ) -> dict[str, TensorFile | str]:
        """All weights of one transformer: this rank's share of the files of its folder. All ranks must call."""
        parameters = dict(transformer.named_parameters())
        sizes = {name: p.numel() * p.element_size() for name, p in parameters.items()}
        plan = plan_files(sizes)
        files: dict[str, TensorFile | str] = {}
        for number, (file, names) in enumerate(plan.filename_to_tensors.items()):
            is_ours = number % world_size == world_rank
            tensors = {}
            for name in names:
                value = full_tensor(parameters[name])  # a collective: every rank joins
                if is_ours:
                    tensors[name] = host_copy(value)
            if is_ours:
                files[f"{folder}/{file}"] = TensorFile(tensors, {"format": "pt"})

        if world_rank == 0:
            files[f"{folder}/config.json"] = transformer.to_json_string()
            if plan.is_sharded:
                index = index_text(plan.tensor_to_filename, sum(sizes.values()))
                files[f"{folder}/{INDEX}"] = index
        return files

    # for the planner and the doctor

    @abstractmethod
    def architecture(self) -> Architecture:
        """The sizes that determine a run's memory and time; needs no weights."""

    def why_no_gradient(
        self, name: str, conditions: Sequence[Conditioning], levels: Sequence[float]
    ) -> str:
        """Why the trained tensor `name` may lack a gradient after training under these conditionings; else empty.

        levels: the noise levels of the trained steps.
        """
        return ""


def guided(
    branch: Callable[[Conditioning], Tensor], cond: Conditioning, guidance: Guidance
) -> Tensor:
    """The guided velocity, `v_neg + scale * (v_pos - v_neg)`, of the velocity without guidance, `branch(cond)`."""
    v_pos = branch(cond)
    if math.isclose(guidance.scale, 1.0):
        return v_pos
    if guidance.negative is None:
        raise ValueError(
            f"guidance {guidance.scale} needs a negative conditioning; encode the negative prompt ('')."
        )
    v_neg = branch(guidance.negative.seeing(cond))
    return v_neg + guidance.scale * (v_pos - v_neg)


def holds_all_weights(checkpoint: Path) -> bool:
    """Whether a checkpoint has all weights, in diffusers layout or as the ranks' shards."""
    is_exported = any((checkpoint / TRANSFORMER).glob("*.safetensors"))
    has_shards = (checkpoint / rank_file(0)).is_file()
    is_lora = bool(saved_adapters(checkpoint))
    return is_exported or (has_shards and not is_lora)


def check_weights(path: Path) -> None:
    """Reject a path where there are no post-trained weights."""
    is_file = path.suffix == ".safetensors" and path.is_file()
    if not (is_file or saved_adapters(path) or holds_all_weights(path)):
        raise FileNotFoundError(
            f"checkpoint_path {path} has neither transformer/*.safetensors nor {LORA_FILE}"
        )


def check_exported(checkpoint: Path) -> None:
    """Reject a checkpoint whose weights changed since they were written."""
    if not (checkpoint / manifest.NAME).is_file():
        return
    parts = [file.name for file in saved_adapters(checkpoint).values()]
    if not parts:
        parts = [TRANSFORMER if (checkpoint / TRANSFORMER).exists() else "trainer"]
    for part in parts:
        manifest.check(checkpoint, part)


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Cast half precision to fp32; fp64 stays, for tests that compare exactly."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
