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

from sage_grpo.rewards.base import Reward, Setup
from sage_grpo.rewards.video_frames import check_clips, sample_indices


class OcrReward(Reward):
    names: tuple[str, ...] = ("ocr",)

    def __init__(self, setup: Setup) -> None:
        try:
            from rapidocr_onnxruntime import RapidOCR
        except ImportError as error:
            raise ValueError(
                f"the reward ocr needs a package ({error}): "
                "pip install --no-deps -r requirements-ocr.txt"
            ) from error
        self.sample_fps = setup.sample_fps_or_default
        # By default it would use all cores, enlarge small frames and look for upside-down text.
        self.reader = RapidOCR(
            intra_op_num_threads=torch.get_num_threads(),
            det_limit_side_len=960,
            det_limit_type="max",
            use_cls=False,
        )

    def check(self, prompts: Sequence[str]) -> None:
        """Reject prompts without quoted text."""
        for prompt in prompts:
            wanted_text(prompt)

    def score(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float | Sequence[float]
    ) -> dict[str, Tensor]:
        rates = check_clips(clips, prompts, fps)
        means = [
            self._mean_likeness(clip, wanted_text(prompt), rate)
            for clip, prompt, rate in zip(clips, prompts, rates, strict=True)
        ]
        return {"ocr": torch.tensor(means)}

    def _mean_likeness(self, clip: Tensor, wanted: str, fps: float) -> float:
        """Mean over the sampled frames of a clip (F, H, W, 3)."""
        indices = sample_indices(len(clip), fps, self.sample_fps)
        frames = clip[indices.to(clip.device)].cpu()
        return sum(likeness(self.read(frame), wanted) for frame in frames) / len(frames)

    def read(self, frame: Tensor) -> str:
        """All text in a uint8 frame (H, W, 3), lowercase, without spaces."""
        lines, _ = self.reader(frame.flip(-1).numpy())  # the reader expects BGR
        return plain("".join(text for _, text, _ in lines or ()))


def wanted_text(prompt: str) -> str:
    """The text between the first double quotes of a prompt, lowercase, without spaces."""
    quoted = re.search(r'"([^"]+)"', prompt)
    if not quoted or not plain(quoted[1]):
        raise ValueError(
            f'the ocr reward finds no text in double quotes in the prompt {prompt!r}; write "TEXT" in it'
        )
    return plain(quoted[1])


def plain(text: str) -> str:
    """Lowercase, without spaces."""
    return re.sub(r"\s", "", text).lower()


def likeness(read: str, wanted: str) -> float:
    """1 if the wanted text occurs in `read`; otherwise less for each letter to change, down to 0."""
    if wanted in read:
        return 1.0
    return max(0.0, 1 - edit_distance(read, wanted) / len(wanted))


def edit_distance(source: str, target: str) -> int:
    """Levenshtein distance: letters to insert, delete or replace."""
    # distances from the letters of the source so far to each beginning of the target
    row = list(range(len(target) + 1))
    for i, letter in enumerate(source, 1):
        previous = row
        row = [i]
        for j, wanted in enumerate(target, 1):
            delete = previous[j] + 1
            insert = row[j - 1] + 1
            keep_or_replace = previous[j - 1] + int(letter != wanted)
            row.append(min(delete, insert, keep_or_replace))
    return row[-1]
