"""CLIPScore and PickScore: how well frames match the prompt, as the cosine of CLIP image and text embeddings.

Each sampled frame is scored and the mean over frames is the clip's score. Scales in the literature:

    cosine      the reward `clipscore`: the raw cosine of CLIP ViT-L/14. The original CLIPScore is 2.5 times that,
                clamped at 0; many tables print it times 100.
    pickscore   exp(logit_scale) * cosine / 26, as in the GRPO papers, where 0.74 is a raw PickScore of 19.2. Others
                divide the raw score by 100, or use (raw - 18) / 8.

Folders use the transformers layout: config.json, *.safetensors, the tokenizer. Prompts are cut after 77 tokens.

Shapes: B clips, N frames in total, D embedding features.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import CLIPModel, CLIPTokenizer

from sage_grpo.files.json_files import naming, read_config
from sage_grpo.models.weights import read_index
from sage_grpo.rewards import video_frames
from sage_grpo.rewards.base import Reward, Setup

MAX_TOKENS = 77
PICKSCORE_SCALE = 26


class ClipScore(Reward):
    """Mean cosine of frame and prompt embeddings."""

    names: tuple[str, ...] = ("cosine",)
    folder = "clip-vit-large-patch14"

    def __init__(self, setup: Setup) -> None:
        self.model, self.tokenizer = load_clip(setup.beside(self.folder))
        self.scale = (
            self.model.logit_scale.exp().item()
        )  # before the cast: bf16 would make it 1 % smaller
        self.model.to(setup.device, setup.dtype)
        self.device, self.sample_fps = setup.device, setup.sample_fps

    @torch.no_grad()
    def score(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float | Sequence[float]
    ) -> dict[str, Tensor]:
        rates = video_frames.check_clips(clips, prompts, fps)
        frames = [self._pixels(clip, rate) for clip, rate in zip(clips, rates, strict=True)]
        images = self.model.get_image_features(
            torch.cat(frames).to(self.model.dtype)
        ).pooler_output  # (N, D)
        limits = {"padding": True, "truncation": True, "max_length": MAX_TOKENS}
        tokens = self.tokenizer(list(prompts), return_tensors="pt", **limits).to(self.device)
        texts = self.model.get_text_features(**tokens).pooler_output  # (B, D)
        counts = [len(part) for part in frames]
        repeated = texts.repeat_interleave(torch.tensor(counts, device=self.device), 0)
        cosines = torch.cosine_similarity(images.float(), repeated.float())
        return {"cosine": torch.stack([part.mean() for part in cosines.split(counts)]).cpu()}

    def _pixels(self, clip: Tensor, fps: float) -> Tensor:
        """(n, 3, side, side): resized to fit the shorter side, center-cropped along the longer one."""
        side = self.model.config.vision_config.image_size
        chosen = video_frames.sample_indices(len(clip), fps, self.sample_fps)
        frames = clip[chosen.to(clip.device)].to(self.device)
        height, width = frames.shape[1:3]
        size = (side, side * width // height) if height < width else (side * height // width, side)
        top, left = ((length - side) // 2 for length in size)
        pixels = video_frames.resize(frames, size)[:, :, top : top + side, left : left + side]
        return video_frames.normalize(pixels)


class PickScore(ClipScore):
    """The cosine of a CLIP ViT-H/14 fine-tuned on human preferences, on the scale of the GRPO papers."""

    names = ("pickscore",)
    folder = "PickScore_v1"

    def score(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float | Sequence[float]
    ) -> dict[str, Tensor]:
        return {
            "pickscore": self.scale * super().score(clips, prompts, fps)["cosine"] / PICKSCORE_SCALE
        }


def load_clip(folder: Path) -> tuple[CLIPModel, CLIPTokenizer]:
    """Load a folder's complete model in fp32 and its tokenizer."""
    for pattern in ("config.json", "*.safetensors", "merges.txt", "vocab.json"):
        if not any(folder.glob(pattern)):
            raise FileNotFoundError(
                f"{folder} has no {pattern}; download a CLIP model with its tokenizer into it"
            )
    for index in folder.glob("*.safetensors.index.json"):
        read_index(index)
    if (
        folder / "adapter_config.json"
    ).exists():  # transformers would load the base model and adapter it names
        raise ValueError(
            f"{folder} holds an adapter_config.json, which no CLIP model needs; delete it"
        )
    read_config(folder / "config.json")
    # Set the attention explicitly: a config could name one that would be downloaded and run.
    safe = {"local_files_only": True, "use_safetensors": True, "attn_implementation": "sdpa"}
    with naming(folder):
        model, report = CLIPModel.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, **safe
        )
        tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    if report["missing_keys"]:
        raise ValueError(
            f"the weights in {folder} lack {min(report['missing_keys'])}; download them again"
        )
    return model.eval(), tokenizer
