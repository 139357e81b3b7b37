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

from sage_grpo.files.fingerprints import files_fingerprint
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
        self.device = setup.device
        self.sample_fps = setup.sample_fps_or_default
        self.weights = setup.beside(self.folder)
        self.model, self.tokenizer = load_clip(self.weights)
        # read before the cast: bf16 would make it 1 % smaller
        self.scale = self.model.logit_scale.exp().item()
        self.model.to(setup.device, setup.dtype)

    @torch.no_grad()
    def score(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float | Sequence[float]
    ) -> dict[str, Tensor]:
        rates = video_frames.check_clips(clips, prompts, fps)
        frames = [self._pixels(clip, rate) for clip, rate in zip(clips, rates, strict=True)]
        counts = [len(pixels) for pixels in frames]
        images = self._embed_images(torch.cat(frames))  # (N, D)
        texts = self._embed_texts(prompts)  # (B, D)

        texts = texts.repeat_interleave(torch.tensor(counts, device=self.device), 0)  # (N, D)
        cosines = torch.cosine_similarity(images.float(), texts.float())  # (N,)
        means = [clip_cosines.mean() for clip_cosines in cosines.split(counts)]
        return {"cosine": torch.stack(means).cpu()}

    def fingerprint(self) -> dict[str, str]:
        return {"weights": files_fingerprint([self.weights])}

    def _embed_images(self, pixels: Tensor) -> Tensor:
        """(N, 3, side, side) -> (N, D)"""
        return self.model.get_image_features(pixels.to(self.model.dtype)).pooler_output

    def _embed_texts(self, prompts: Sequence[str]) -> Tensor:
        """(B, D)"""
        tokens = self.tokenizer(
            list(prompts),
            return_tensors="pt",
            padding=True,
            truncation=True,
            max_length=MAX_TOKENS,
        )
        return self.model.get_text_features(**tokens.to(self.device)).pooler_output

    def _pixels(self, clip: Tensor, fps: float) -> Tensor:
        """(n, 3, side, side): resized to fit the shorter side, center-cropped along the longer one."""
        indices = video_frames.sample_indices(len(clip), fps, self.sample_fps)
        frames = clip[indices.to(clip.device)].to(self.device)

        side = self.model.config.vision_config.image_size
        height, width = frames.shape[1:3]
        if height < width:
            size = (side, side * width // height)
        else:
            size = (side * height // width, side)
        top = (size[0] - side) // 2
        left = (size[1] - side) // 2
        pixels = video_frames.resize(frames, size)[:, :, top : top + side, left : left + side]
        return video_frames.normalize(pixels)


class PickScore(ClipScore):
    """The cosine of a CLIP ViT-H/14 fine-tuned on human preferences, on the scale of the GRPO papers."""

    names = ("pickscore",)
    folder = "PickScore_v1"

    def score(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float | Sequence[float]
    ) -> dict[str, Tensor]:
        cosine = super().score(clips, prompts, fps)["cosine"]
        return {"pickscore": self.scale * cosine / PICKSCORE_SCALE}


def load_clip(folder: Path) -> tuple[CLIPModel, CLIPTokenizer]:
    """Load a folder's model, in fp32 and complete, and its tokenizer."""
    for pattern in ("config.json", "*.safetensors", "merges.txt", "vocab.json"):
        if not any(folder.glob(pattern)):
            raise FileNotFoundError(
                f"{folder} has no {pattern}; download a CLIP model with its tokenizer into it"
            )
    for index in folder.glob("*.safetensors.index.json"):
        read_index(index)
    # transformers would load the base model and the adapter that it names
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder} holds an adapter_config.json, which no CLIP model needs; delete it"
        )
    read_config(folder / "config.json")

    with naming(folder):
        model, report = CLIPModel.from_pretrained(
            folder,
            dtype=torch.float32,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
            # set explicitly: a config could name one that would be downloaded and run
            attn_implementation="sdpa",
        )
        tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    missing = report["missing_keys"]
    if missing:
        raise ValueError(f"the weights in {folder} lack {min(missing)}; download them again")
    return model.eval(), tokenizer
