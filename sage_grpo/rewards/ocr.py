"""Text rendering, as in Flow-GRPO: how much of the prompt's double-quoted text is legible in the clip.

A frame scores 1 - distance / length of the target text: 1 if the text read contains it, 0 if nothing of it is read.
The mean over the sampled frames is the clip's score (Flow-GRPO's video variant skips frames that score 0, which
rewards text that only flashes up). Case and spaces are ignored. Uses rapidocr, whose package includes its weights,
without detecting rotated text, like Flow-GRPO's PaddleOCR: 0.1 s for a 352 x 624 frame on one core.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from sage_grpo.rewards import video_frames
from sage_grpo.rewards.base import Setup


class OcrReward:
    names = ("ocr",)

    def __init__(self, setup: Setup) -> None:
        try:
            from rapidocr_onnxruntime import RapidOCR
        except ImportError as error:
            text = f"the reward ocr needs a package ({error}): pip install --no-deps -r requirements-ocr.txt"
            raise ValueError(text) from error
        self.sample_fps = setup.sample_fps
        # By default it would use all cores, enlarge small frames and look for upside-down text.
        limits = {
            "intra_op_num_threads": torch.get_num_threads(),
            "det_limit_side_len": 960,
            "det_limit_type": "max",
        }
        self.reader = RapidOCR(**limits, use_cls=False)

    def check(self, prompts: Sequence[str]) -> None:
        """Reject prompts without quoted text."""
        for prompt in prompts:
            wanted_text(prompt)

    def score(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float | Sequence[float]
    ) -> dict[str, Tensor]:
        rates = video_frames.check_clips(clips, prompts, fps)
        means = []
        for clip, wanted, rate in zip(clips, map(wanted_text, prompts), rates, strict=True):
            frames = clip[
                video_frames.sample_indices(len(clip), rate, self.sample_fps).to(clip.device)
            ].cpu()
            means.append(sum(likeness(self.read(frame), wanted) for frame in frames) / len(frames))
        return {"ocr": torch.tensor(means)}

    def read(self, frame: Tensor) -> str:
        """All text in a uint8 frame (H, W, 3), lowercase, without spaces."""
        lines, _ = self.reader(frame.flip(-1).numpy())  # the reader expects BGR
        return plain("".join(text for _, text, _ in lines or ()))


def wanted_text(prompt: str) -> str:
    quoted = re.search(r'"([^"]+)"', prompt)
    if not quoted or not plain(quoted[1]):
        raise ValueError(
            f'the ocr reward finds no text in double quotes in the prompt {prompt!r}; write "TEXT" in it'
        )
    return plain(quoted[1])


def plain(text: str) -> str:
    return re.sub(r"\s", "", text).lower()


def likeness(read: str, wanted: str) -> float:
    """1 if the wanted text occurs in `read`; otherwise less for each letter to change, down to 0."""
    return 1.0 if wanted in read else max(0.0, 1 - edit_distance(read, wanted) / len(wanted))


def edit_distance(one: str, other: str) -> int:
    """Levenshtein distance: letters to insert, delete or replace."""
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        above, row = row, [i]
        for j, wanted in enumerate(other, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (letter != wanted)))
    return row[-1]
