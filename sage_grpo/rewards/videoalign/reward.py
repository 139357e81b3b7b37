"""VideoAlign ("VideoReward"): visual quality, motion quality and text alignment from a fine-tuned Qwen2-VL.

The model reads a rubric with the clip in front and the prompt near the end. Each of the three parts ends in a reward
token; the final hidden state there, times one vector, is the score. Attention is causal and the prompt comes after VQ
and MQ, so only TA depends on it. Normalized scores are z-scores using the mean and standard deviation in the folder;
higher is better. The published "overall" is their sum.

Shapes: B clips, L tokens, D hidden features, P vision patches in the batch.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sage_grpo.files.fingerprints import files_fingerprint
from sage_grpo.rewards import video_frames
from sage_grpo.rewards.base import Setup
from sage_grpo.rewards.videoalign import folder as videoalign_folder
from sage_grpo.rewards.videoalign.folder import PAD_TOKEN, VIDEO_TOKEN


class VideoAlign:
    """A folder of weights as a reward; `folder.py` says what the folder holds."""

    names = videoalign_folder.DIMENSIONS

    def __init__(
        self,
        folder: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        sample_fps: float | None = None,
    ) -> None:
        """sample_fps: frames sampled per second; None: as in the folder's settings."""
        folder = Path(folder)
        self.folder = folder
        settings = videoalign_folder.read_settings(folder)
        checkpoint = videoalign_folder.newest_checkpoint(folder)
        self.device = torch.device(device)

        # frames
        data = settings["data_config"]
        self.sample_fps = sample_fps or data["fps"]
        self.num_frames = data.get("num_frames")  # in place of a rate
        self.max_pixels = data["max_frame_pixels"]
        # a small model may want small frames
        self.min_pixels = data.get("min_frame_pixels", video_frames.MIN_PIXELS)

        # text
        self.template = videoalign_folder.read_template(folder)
        self.tokenizer = videoalign_folder.read_tokenizer(folder, checkpoint)
        ids = self.tokenizer.convert_tokens_to_ids(videoalign_folder.TOKENS)
        self.reward_tokens = torch.tensor(ids, device=self.device)

        # model
        model, head = videoalign_folder.load_model(folder, checkpoint, settings, dtype)
        num_embeddings = model.get_input_embeddings().num_embeddings
        if num_embeddings != len(self.tokenizer):
            raise ValueError(
                f"{checkpoint} embeds {num_embeddings} tokens, "
                f"but its tokenizer has {len(self.tokenizer)}"
            )
        self.model = model.to(self.device)
        self.head = head.to(self.device)
        self.norm: dict[str, float] | None = settings.get("inference_config")

    def check(self, prompts: Sequence[str]) -> None:
        """Reject prompts that contain special tokens: they could insert a video or a score."""
        for prompt in set(prompts):
            reserved = [token for token in self.tokenizer.get_added_vocab() if token in prompt]
            if reserved:
                raise ValueError(
                    f"the prompt {prompt!r} holds {reserved[0]}, "
                    "which the reward reserves; take it out"
                )

    def fingerprint(self) -> dict[str, str]:
        return {"weights": files_fingerprint([self.folder])}

    @torch.no_grad()
    def score(
        self,
        clips: Sequence[Tensor],
        prompts: Sequence[str],
        fps: float | Sequence[float],
        normalize: bool = True,
    ) -> dict[str, Tensor]:
        """VQ, MQ and TA, each (B,) fp32 on the CPU, for uint8 clips (frames, height, width, 3) of any sizes.

        The clips' `fps` determines how many frames are sampled. Without `inference_config`, scores are raw only.
        """
        hidden = self.hidden(self.inputs(clips, prompts, fps))  # (B, 3, D)
        products = hidden.float() @ self.head.T  # (B, 3, output_dim)
        # the head has one vector for all three tokens, or one for each
        raw = products[..., 0] if len(self.head) == 1 else products.diagonal(dim1=1, dim2=2)
        scores = dict(zip(self.names, raw.cpu().unbind(1), strict=True))
        if not normalize or self.norm is None:
            return scores
        return {
            name: (values - self.norm[f"{name}_mean"]) / self.norm[f"{name}_std"]
            for name, values in scores.items()
        }

    def inputs(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float | Sequence[float]
    ) -> dict[str, Tensor]:
        """Tokens (B, L), padded on the right; patches (P, 1176); patches per clip in time, height and width (B, 3)."""
        rates = video_frames.check_clips(clips, prompts, fps)
        self.check(prompts)

        # clips that are all alike are cut into patches together, others one by one
        kinds = {(clip.shape, rate) for clip, rate in zip(clips, rates, strict=True)}
        size = len(clips) if len(kinds) == 1 else 1
        patches: list[Tensor] = []
        grids: list[tuple[int, int, int]] = []  # one per clip
        for start in range(0, len(clips), size):
            batch = torch.stack(clips[start : start + size])
            batch_patches, grid = self._patches(batch, rates[start])
            patches.append(batch_patches.flatten(0, 1))
            grids += [grid] * len(batch)

        return self.joined(patches, grids, prompts)

    def joined(
        self,
        patches: Sequence[Tensor],
        grids: Sequence[tuple[int, int, int]],
        prompts: Sequence[str],
    ) -> dict[str, Tensor]:
        """Inputs of the model for clips that are cut into patches; grids, prompts: one per clip."""
        # equal prompts of equal clips are tokenized once
        keys = list(zip(prompts, grids, strict=True))
        tokens = {(prompt, grid): self._tokens(prompt, grid) for prompt, grid in set(keys)}
        padded = pad_sequence(
            [tokens[key] for key in keys],
            batch_first=True,
            padding_value=self.tokenizer.convert_tokens_to_ids(PAD_TOKEN),
        )
        return {
            "input_ids": padded.to(self.device),
            "pixel_values_videos": torch.cat(list(patches)),
            "video_grid_thw": torch.tensor(grids, device=self.device),
        }

    def hidden(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """(B, 3, D) final hidden states at the reward tokens."""
        tokens = inputs["input_ids"]
        # Plain positions on all three axes, as in training. No mask: padding comes last and attention is causal.
        positions = torch.arange(tokens.shape[1], device=self.device).expand(3, *tokens.shape)
        hidden = self.model(**inputs, position_ids=positions, use_cache=False).last_hidden_state
        places = (tokens[..., None] == self.reward_tokens).int().argmax(1)  # (B, 3)
        return hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))

    def _patches(self, clips: Tensor, fps: float) -> tuple[Tensor, tuple[int, int, int]]:
        """Patches (B, P, 1176) of clips of one size (B, F, H, W, 3), and the grid of each."""
        indices = video_frames.sample_indices(clips.shape[1], fps, self.sample_fps, self.num_frames)
        frames = clips[:, indices.to(clips.device)].to(self.device).flatten(0, 1)
        height, width = frames.shape[1:3]
        size = video_frames.frame_size(height, width, self.max_pixels, self.min_pixels)
        pixels = video_frames.normalize(video_frames.resize(frames, size))
        rows, (times, grid_height, grid_width) = video_frames.patches(pixels)
        grid = (times // len(clips), grid_height, grid_width)
        return rows.unflatten(0, (len(clips), -1)), grid

    def _tokens(self, prompt: str, grid: tuple[int, int, int]) -> Tensor:
        """(L,) one chat turn: a video token per four patches, then the rubric with the prompt inserted."""
        text = self.template.replace(videoalign_folder.PLACEHOLDER, prompt)
        turn = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": text}]}
        chat = self.tokenizer.apply_chat_template(
            [turn], tokenize=False, add_generation_prompt=True
        )
        num_video_tokens = math.prod(grid) // video_frames.MERGE**2
        chat = chat.replace(VIDEO_TOKEN, VIDEO_TOKEN * num_video_tokens)
        return torch.tensor(self.tokenizer(chat, add_special_tokens=False).input_ids)


def build(setup: Setup) -> VideoAlign:
    """The reward of the registry."""
    return VideoAlign(setup.path, setup.device, setup.dtype, setup.sample_fps)
