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

from sage_grpo.rewards import video_frames
from sage_grpo.rewards.base import Setup
from sage_grpo.rewards.videoalign import folder as videoalign_folder

VIDEO_TOKEN, PAD_TOKEN = "<|video_pad|>", "<|endoftext|>"


class VideoAlign:
    """A folder of weights as a reward; see `videoalign_folder.py` for what the folder holds."""

    names = videoalign_folder.DIMENSIONS

    def __init__(
        self,
        folder: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        sample_fps: float | None = None,
    ) -> None:
        """sample_fps: frames per second, if not those of the folder's settings."""
        folder, self.device = Path(folder), torch.device(device)
        settings, checkpoint = (
            videoalign_folder.read_settings(folder),
            videoalign_folder.newest_checkpoint(folder),
        )
        data = settings["data_config"]
        self.sample_fps, self.max_pixels = sample_fps or data["fps"], data["max_frame_pixels"]
        self.num_frames = data.get("num_frames")  # in place of a rate
        self.min_pixels = data.get(
            "min_frame_pixels", video_frames.MIN_PIXELS
        )  # a small model may want small frames
        self.norm: dict[str, float] | None = settings.get("inference_config")
        self.template = videoalign_folder.read_template(folder)
        self.tokenizer = videoalign_folder.read_tokenizer(folder, checkpoint)
        model, head = videoalign_folder.load_model(folder, checkpoint, settings, dtype)
        rows = model.get_input_embeddings().num_embeddings
        if rows != len(self.tokenizer):
            raise ValueError(
                f"{checkpoint} embeds {rows} tokens, but its tokenizer has {len(self.tokenizer)}"
            )
        self.model, self.head = model.to(self.device), head.to(self.device)
        ids = self.tokenizer.convert_tokens_to_ids(videoalign_folder.TOKENS)
        self.reward_tokens = torch.tensor(ids, device=self.device)

    def check(self, prompts: Sequence[str]) -> None:
        """Reject prompts that contain special tokens: they could insert a video or a score."""
        for prompt in set(prompts):
            if token := next(
                (token for token in self.tokenizer.get_added_vocab() if token in prompt), None
            ):
                raise ValueError(
                    f"the prompt {prompt!r} holds {token}, which the reward reserves; take it out"
                )

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
        raw = (
            self.hidden(self.inputs(clips, prompts, fps)).float() @ self.head.T
        )  # (B, 3, output_dim)
        raw = (raw.diagonal(dim1=1, dim2=2) if len(self.head) > 1 else raw[..., 0]).cpu()
        scores = dict(zip(self.names, raw.unbind(1), strict=True))
        if not normalize or self.norm is None:
            return scores
        return {
            name: (s - self.norm[f"{name}_mean"]) / self.norm[f"{name}_std"]
            for name, s in scores.items()
        }

    def inputs(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float | Sequence[float]
    ) -> dict[str, Tensor]:
        """Tokens (B, L), padded on the right; patches (P, 1176); patches per clip in time, height and width (B, 3)."""
        rates = video_frames.check_clips(clips, prompts, fps)
        self.check(prompts)
        size = (
            len(clips)
            if len({(clip.shape, rate) for clip, rate in zip(clips, rates, strict=True)}) == 1
            else 1
        )
        seen = [
            self._patches(torch.stack(clips[i : i + size]), rates[i])
            for i in range(0, len(clips), size)
        ]
        asked = list(zip(prompts, (grid for patches, grid in seen for _ in patches), strict=True))
        tokens = {key: self._tokens(*key) for key in set(asked)}
        padding = self.tokenizer.convert_tokens_to_ids(PAD_TOKEN)
        padded = pad_sequence(
            [tokens[key] for key in asked], batch_first=True, padding_value=padding
        )
        grids = torch.tensor([grid for _, grid in asked], device=self.device)
        rows = torch.cat([patches.flatten(0, 1) for patches, _ in seen])
        return {
            "input_ids": padded.to(self.device),
            "pixel_values_videos": rows,
            "video_grid_thw": grids,
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
        chosen = video_frames.sample_indices(clips.shape[1], fps, self.sample_fps, self.num_frames)
        frames = clips[:, chosen.to(clips.device)].to(self.device).flatten(0, 1)
        size = video_frames.frame_size(*frames.shape[1:3], self.max_pixels, self.min_pixels)
        rows, (times, *side) = video_frames.patches(
            video_frames.normalize(video_frames.resize(frames, size))
        )
        return rows.unflatten(0, (len(clips), -1)), (times // len(clips), *side)

    def _tokens(self, prompt: str, grid: tuple[int, int, int]) -> Tensor:
        """(L,) one chat turn: a video token per four patches, then the rubric with the prompt inserted."""
        text = self.template.replace(videoalign_folder.PLACEHOLDER, prompt)
        turn = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": text}]}
        chat = self.tokenizer.apply_chat_template(
            [turn], tokenize=False, add_generation_prompt=True
        )
        chat = chat.replace(VIDEO_TOKEN, VIDEO_TOKEN * (math.prod(grid) // video_frames.MERGE**2))
        return torch.tensor(self.tokenizer(chat, add_special_tokens=False).input_ids)


def build(setup: Setup) -> VideoAlign:
    return VideoAlign(setup.path, setup.device, setup.dtype, setup.sample_fps)
