"""The clips of a study as the reward reads them. Slow results are stored, so that a second call continues."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from sage_grpo.files.foreign import open_regular
from sage_grpo.rewards.videoalign.reward import VideoAlign
from sage_grpo.runs.media import read_mp4, reduced
from sage_grpo.tools.prefer.study import MAX_CLIP_BYTES, Study, clip_path

BATCH = 16  # clips per forward


class StudyClips:
    """Clips by number, cut into patches in the precision of the reward's model."""

    def __init__(
        self, reward: VideoAlign, study: Study, answers: Path, store: Path, key: str
    ) -> None:
        """store: folder for computed results. key: of what these depend on."""
        self.reward = reward
        self.study = study
        self.answers = answers
        self.store = store
        self.key = key

    def inputs(self, numbers: Sequence[int], keeps: bool) -> dict[str, Tensor]:
        """The model's inputs for these clips; `keeps`: store the patches, which will be needed again."""
        patches = []
        grids = []
        for number in numbers:
            rows, grid = self.patches(number, keeps)
            patches.append(rows.to(self.reward.device))
            grids.append(grid)
        prompts = [self.study.clips[number].prompt for number in numbers]
        self.reward.check(prompts)
        return self.reward.joined(patches, grids, prompts)

    def patches(self, number: int, keeps: bool) -> tuple[Tensor, tuple[int, int, int]]:
        """Patches (P, 1176) of a clip and its grid, from the store if they are there."""
        file = self.store / f"{self.key}-clip-{number:06d}.safetensors"
        if file.is_file():
            stored = load_file(file)
            times, height, width = stored["grid"].tolist()
            return stored["patches"], (times, height, width)
        path = clip_path(self.answers, self.study.clips[number])
        with open_regular(path, MAX_CLIP_BYTES):  # a pipe would be waited for
            video, fps = read_mp4(path)
        patches, grid = self.cut(video, fps, number)
        if keeps:
            tensors = {"patches": patches.cpu().contiguous(), "grid": torch.tensor(grid)}
            write_at_once(file, tensors)
        return patches, grid

    def cut(self, video: Tensor, fps: float, number: int) -> tuple[Tensor, tuple[int, int, int]]:
        """Patches (P, 1176) of a clip (F, H, W, 3) from a file, and its grid."""
        clip = self.study.clips[number]
        sampled = reduced(video, clip.height, clip.width)
        inputs = self.reward.inputs([sampled], [clip.prompt], fps)
        times, height, width = inputs["video_grid_thw"][0].tolist()
        dtype = next(self.reward.model.parameters()).dtype
        return inputs["pixel_values_videos"].to(dtype), (times, height, width)

    @torch.no_grad()
    def hidden(self, keeps: bool) -> Tensor:
        """Hidden states (N, 3, D) of all clips, fp32 on the CPU; each batch is stored."""
        self.store.mkdir(parents=True, exist_ok=True)
        parts = []
        starts = range(0, len(self.study.clips), BATCH)
        for start in tqdm(starts, "hidden states", unit="batch"):
            file = self.store / f"{self.key}-{start:06d}.safetensors"
            if not file.is_file():
                numbers = range(start, min(start + BATCH, len(self.study.clips)))
                states = self.reward.hidden(self.inputs(numbers, keeps))
                write_at_once(file, {"hidden": states.float().cpu().contiguous()})
            parts.append(load_file(file)["hidden"])
        return torch.cat(parts)


def write_at_once(file: Path, tensors: dict[str, Tensor]) -> None:
    unfinished = file.with_suffix(".new")
    save_file(tensors, unfinished)
    unfinished.rename(file)
