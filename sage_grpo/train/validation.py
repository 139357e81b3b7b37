"""Validation: held-out prompts sampled with the ODE from fixed seeds, scored, and saved as clips."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from sage_grpo.algo.sde import flow_sigmas
from sage_grpo.config.fields import Config
from sage_grpo.data.requests import Request
from sage_grpo.files.json_files import finite, write_json
from sage_grpo.models.backbone import Backbone, BrokenClip, Guidance, Sampling
from sage_grpo.models.embeddings import alike, together
from sage_grpo.models.sample import counter_noise, integrate
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.base import Composite
from sage_grpo.runs.clips import LISTING, PLACES, write_sheet, write_videos

RESCORED = 8  # clips of each rank that are scored twice

Gold = Callable[[Tensor, Sequence[Request]], dict[str, Tensor]]


@dataclass(eq=False)
class Validation:
    """Samples the same prompts from the same noise every time, so clips from two steps can be compared one by one."""

    backbone: Backbone
    config: Config
    prompts: Sequence[Request]
    guidance: Guidance
    reward: Composite
    holdout: Composite | None
    gold: Gold | None
    ranks: Ranks

    def __post_init__(self) -> None:
        self.sampling = own = validation_sampling(self.config)
        self.sigmas = flow_sigmas(own.num_steps, own.shift)
        self.shape = self.backbone.latent_shape(own.frames, own.height, own.width)

    def run(
        self,
        folder: Path,
        between: Callable[[], None] = lambda: None,
        gathered: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> dict[str, Any]:
        """Write the clips and clips.json into `folder`; returns means and their standard errors.

        between: called on all ranks after each denoising step and each clip; it may raise. gathered: context for the
        denoising alone, because weights that stay gathered would take the VAE's memory.
        """
        parts = self.joined(self.prompts[self.ranks.rank :: self.ranks.count])
        mine, each = (
            [prompt for part in parts for prompt in part],
            -(-len(self.prompts) // self.ranks.count),
        )
        # A sharded model's forward needs all ranks, so ranks with fewer clips sample an extra one and discard it.
        parts += [[prompt] for prompt in self.prompts[: each - len(mine)]]
        bar = tqdm(parts, "validation", unit="batch", leave=False, disable=not self.ranks.first)
        with gathered():
            latents = [self.latents(part, between) for part in bar]
        clips = [clip for x in latents for clip in self.decode(x, between)][: len(mine)]
        records = self.ranks.from_leader(lambda: self.judge(clips, mine, RESCORED))
        kept = {self.file(prompt) for prompt in self.prompts[: self.config.validation_videos]}
        self._keep(lambda: write_videos(folder, clips, records, kept, self.config.fps))
        shared = self.ranks.texts(json.dumps(records, ensure_ascii=False, allow_nan=False))
        everything = sorted(
            (r for text in shared for r in json.loads(text)), key=lambda record: record["file"]
        )
        if self.ranks.first:
            self._keep(lambda: write_json(folder / LISTING, everything, ensure_ascii=False))
            self._keep(lambda: write_sheet(folder, clips, records))
        return summary(everything)

    @staticmethod
    def _keep(write: Callable[[], None]) -> None:
        """Write files that are only for viewing; a full disk must not stop the run."""
        try:
            write()
        except OSError as error:
            first = str(error).partition("\n")[0]  # ffmpeg's errors are long
            print(f"note: a validation could not be written: {first}", file=sys.stderr, flush=True)

    def sample(self, prompt: Request) -> Tensor | None:
        """One clip (F, H, W, 3) on the leader; None elsewhere, and if its latents or pixels are not finite."""
        return self.decode(self.latents([prompt]))[0]

    def joined(self, prompts: Sequence[Request]) -> list[list[Request]]:
        """The prompts that share a forward, up to `prompts_per_forward` whose texts are equally long."""
        if (most := self.config.prompts_per_forward) == 1:
            return [[prompt] for prompt in prompts]
        return [[prompts[i] for i in part] for part in alike(self.backbone.encode(prompts), most)]

    @torch.no_grad()
    def latents(
        self, prompts: Sequence[Request], between: Callable[[], None] = lambda: None
    ) -> Tensor:
        """The latents (B, ...) of B prompts that share a forward, a clip each."""
        noise = [
            counter_noise(self.shape, self.seed(prompt), [0], prompt=prompt.index)[0]
            for prompt in prompts
        ]
        cond, x = together(self.backbone.encode(prompts)), torch.cat(noise).to(self.ranks.device)
        # a full-size clip takes minutes
        return integrate(
            self.backbone,
            self.sigmas,
            x,
            cond,
            self.guidance,
            self.config.validation_solver,
            between,
        )

    @torch.no_grad()
    def decode(
        self, latents: Tensor, between: Callable[[], None] = lambda: None
    ) -> list[Tensor | None]:
        """As `sample`, of latents (B, ...)."""
        between()
        sound = [self.ranks.leader and bool(x.isfinite().all()) for x in latents]
        clips = iter(decoded(self.backbone, latents[sound].split(1)) if any(sound) else ())
        return [next(clips) if good else None for good in sound]

    def seed(self, prompt: Request) -> int:
        return self.config.validation_global_seed if prompt.seed is None else prompt.seed

    def file(self, prompt: Request) -> str:
        return f"{prompt.name}-{self.seed(prompt)}.mp4"

    def judge(
        self, clips: Sequence[Tensor | None], prompts: Sequence[Request], twice: int = 0
    ) -> list[dict[str, Any]]:
        """One record per clip: file, prompt, seed and scores, plus the reward's error if it failed.

        twice: clips that are scored again, in another order: a reward may depend on chance or on its batch.
        """
        scores = self.reward.score(clips, prompts, self.config.fps)
        few = slice(min(twice, len(clips)))
        again = (
            self.reward.score(clips[few][::-1], prompts[few][::-1], self.config.fps)
            .total.flip(0)
            .tolist()
        )
        columns = {
            "scores": scores.named | {"total": scores.total},
            "holdout": self.holdout.score(clips, prompts, self.config.fps).named
            if self.holdout
            else {},
            "gold": gold_columns(self.gold, clips, prompts),
        }
        return [
            {"file": self.file(prompt), "prompt": prompt.text, "seed": self.seed(prompt)}
            | ({"image": str(prompt.image.path)} if prompt.image else {})
            | (
                {"error": scores.errors[0]}
                if scores.errors and not scores.total[i].isfinite()
                else {}
            )
            | {
                kind: finite({name: v[i].item() for name, v in named.items()})
                for kind, named in columns.items()
            }
            | finite({"scored_again": again[i]} if i < len(again) else {})
            for i, prompt in enumerate(prompts)
        ]


def validation_sampling(c: Config) -> Sampling:
    """How a resolved configuration samples validation clips."""
    height, _, width = c.validation_fixed_size.lower().partition("x")
    if not (height.isdigit() and width.isdigit()):
        raise ValueError(
            f"validation_fixed_size is {c.validation_fixed_size!r}; write HEIGHTxWIDTH, such as 480x848"
        )
    size = {
        "frames": c.validate_video_length,
        "height": int(height),
        "width": int(width),
        "fps": c.fps,
    }
    ode = {"shift": c.validation_timestep_shift, "num_steps": c.validation_num_inference_steps}
    return Sampling(**size, **ode, guidance=c.guidance_scale)


def decoded(backbone: Backbone, latents: Sequence[Tensor]) -> list[Tensor | None]:
    """uint8 clips (F, H, W, 3) on the CPU, of latents (1, ...) each; None where pixels are not finite."""
    try:
        return [
            clip.clone() for clip in backbone.decode(torch.cat(latents)).cpu()
        ]  # clone: send one, not all
    except BrokenClip:  # find the clip
        return (
            [None]
            if len(latents) == 1
            else [clip for one in latents for clip in decoded(backbone, [one])]
        )


def gold_columns(
    gold: Gold | None, clips: Sequence[Tensor | None], asked: Sequence[Request]
) -> dict[str, Tensor]:
    """Gold metrics of each clip, (N,), NaN for missing clips; empty if the world has no oracle."""
    there = [i for i, clip in enumerate(clips) if clip is not None]
    if gold is None or not there:
        return {}
    found = gold(torch.stack([clips[i] for i in there]), [asked[i] for i in there])
    missing, rows = torch.full((len(clips),), math.nan, dtype=torch.float64), torch.tensor(there)
    return {name: missing.index_copy(0, rows, values.double()) for name, values in found.items()}


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means and standard errors over the clips that have a value."""
    result: dict[str, Any] = {"count": len(records)}
    for kind, place in PLACES.items():
        for name in dict.fromkeys(name for record in records for name in record[place]):
            values = np.array(
                [r[place][name] for r in records if r[place].get(name) is not None], dtype=float
            )
            result[f"{kind}/{name}"] = values.mean().item() if len(values) else math.nan
            spread = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
            result[f"{kind}/{name}_stderr"] = float(spread)
    both = [(record["scores"]["total"], record.get("scored_again")) for record in records]
    squares = [(one - other) ** 2 / 2 for one, other in both if None not in (one, other)]
    result["signal/rescoring"] = math.sqrt(np.mean(squares)) if squares else math.nan
    result["reward/failed"] = sum(record["scores"]["total"] is None for record in records)
    return result
