"""Validation: held-out prompts sampled with the ODE from fixed seeds, scored, and saved as clips."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
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
from sage_grpo.models.backbone import Backbone, Guidance, Sampling
from sage_grpo.models.embeddings import alike, shared_or_stacked
from sage_grpo.models.sample import counter_noise, integrate
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.base import Composite
from sage_grpo.runs.clips import LISTING, RECORD_KEYS, write_sheet, write_videos
from sage_grpo.train.clips import Gold, decoded, gold_metrics
from sage_grpo.train.reward_checks import (
    NUM_RESCORED,
    from_all_ranks,
    rescored,
    rescoring_record,
)


@dataclass(eq=False)
class Validation:
    """Samples the same prompts from the same noise every time, so clips from two steps can be compared one by one."""

    backbone: Backbone
    config: Config
    requests: Sequence[Request]  # held-out prompts
    guidance: Guidance
    reward: Composite
    holdout_reward: Composite | None
    gold: Gold | None
    ranks: Ranks

    def __post_init__(self) -> None:
        self.sampling = validation_sampling(self.config)
        self.sigmas = flow_sigmas(self.sampling.num_steps, self.sampling.shift)
        self.shape = self.backbone.latent_shape(
            self.sampling.frames, self.sampling.height, self.sampling.width
        )

    def run(
        self,
        folder: Path,
        between: Callable[[], None] = lambda: None,
        keep_unsharded: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> dict[str, Any]:
        """Write the clips and clips.json into `folder`; returns means and their standard errors.

        between: called on all ranks after each denoising step and each clip; it may raise. keep_unsharded: context for
        the denoising alone, because weights that stay unsharded would take the VAE's memory.
        """
        batches = self.joined(self.requests[self.ranks.dp_rank :: self.ranks.dp_size])
        rank_requests = [request for batch in batches for request in batch]
        # A sharded model's forward needs all ranks, so ranks with fewer clips sample an extra one and discard it.
        most_per_rank = -(-len(self.requests) // self.ranks.dp_size)
        num_extra = most_per_rank - len(rank_requests)
        batches += [[request] for request in self.requests[:num_extra]]

        with StageBar(desc="validation", leave=False, disable=not self.ranks.is_first) as bar:
            with keep_unsharded():
                latents = [self.latents(batch, between) for batch in bar.over("sampling", batches)]
            decoded_batches = [self.decode(x, between) for x in bar.over("decoding", latents)]
            clips = [clip for batch in decoded_batches for clip in batch][: len(rank_requests)]
            with self.counted_scoring(bar, len(clips)):
                records = self.ranks.from_leader(lambda: self.score_clips(clips, rank_requests))
                scored_again = self.ranks.from_leader(
                    lambda: rescored(self.reward, clips, rank_requests, self.config.fps)
                )
            bar.begin("writing")
            result = self.write(folder, clips, records)
            return result | rescoring_record(from_all_ranks(self.ranks, scored_again))

    @contextmanager
    def counted_scoring(self, bar: "StageBar", num_clips: int) -> Iterator[None]:
        """Advance the bar with every batch of clips that a reward scores."""
        rewards = [reward for reward in (self.reward, self.holdout_reward) if reward is not None]
        num_batches = sum(reward.num_batches(num_clips) for reward in rewards)
        if self.reward is not None:
            num_rescored = min(num_clips, NUM_RESCORED)
            num_batches += self.reward.num_batches(num_rescored)
            num_batches += 2 * self.reward.one_per_call().num_batches(num_rescored)
        bar.begin("scoring", num_batches)

        callbacks = [reward.on_batch for reward in rewards]

        def counted(callback: Callable[[], None]) -> None:
            callback()
            bar.update()

        for reward, callback in zip(rewards, callbacks, strict=True):
            reward.on_batch = partial(counted, callback)
        try:
            yield
        finally:
            for reward, callback in zip(rewards, callbacks, strict=True):
                reward.on_batch = callback

    def write(
        self, folder: Path, clips: Sequence[Tensor | None], records: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """Write this rank's clips, and on the first rank the records of all; returns the summary of these."""
        with_video = {
            self.file(request) for request in self.requests[: self.config.validation_videos]
        }
        self._keep(lambda: write_videos(folder, clips, records, with_video, self.config.fps))
        rank_texts = self.ranks.texts(json.dumps(records, ensure_ascii=False, allow_nan=False))
        all_records = [record for text in rank_texts for record in json.loads(text)]
        all_records.sort(key=lambda record: record["file"])
        if self.ranks.is_first:
            self._keep(lambda: write_json(folder / LISTING, all_records, ensure_ascii=False))
            self._keep(lambda: write_sheet(folder, clips, records))
        return summary(all_records)

    @staticmethod
    def _keep(write: Callable[[], None]) -> None:
        """Write files that are only for viewing; a full disk must not stop the run."""
        try:
            write()
        except OSError as error:
            first = str(error).partition("\n")[0]  # ffmpeg's errors are long
            print(f"note: a validation could not be written: {first}", file=sys.stderr, flush=True)

    def sample(self, request: Request) -> Tensor | None:
        """One clip (F, H, W, 3) on the leader; None elsewhere, and if its latents or pixels are not finite."""
        return self.decode(self.latents([request]))[0]

    def joined(self, requests: Sequence[Request]) -> list[list[Request]]:
        """The requests that share a forward, up to `prompts_per_forward` whose texts are equally long."""
        most = self.config.prompts_per_forward
        if most == 1:
            return [[request] for request in requests]
        batches = alike(self.backbone.encode(requests), most)
        return [[requests[number] for number in batch] for batch in batches]

    @torch.no_grad()
    def latents(
        self, requests: Sequence[Request], between: Callable[[], None] = lambda: None
    ) -> Tensor:
        """The latents (B, ...) of B requests that share a forward, a clip each."""
        conditions = self.backbone.encode(requests)
        shape = self.backbone.free_shape(self.shape, conditions[0])
        noise = []
        for request in requests:
            first, _ = counter_noise(shape, self.seed(request), [0], prompt=request.index)
            noise.append(first)
        x = torch.cat(noise).to(self.ranks.device)
        cond = shared_or_stacked(conditions)
        x = integrate(
            self.backbone,
            self.sigmas,
            x,
            cond,
            self.guidance,
            solver=self.config.validation_solver,
            between=between,  # after each step, because a full-size clip takes minutes
        )
        return self.backbone.full_latents(x, cond)

    @torch.no_grad()
    def decode(
        self, latents: Tensor, between: Callable[[], None] = lambda: None
    ) -> list[Tensor | None]:
        """Decode latents (B, ...) on the leader; None for non-finite clips, and on other ranks."""
        between()
        is_finite = [self.ranks.is_leader and bool(x.isfinite().all()) for x in latents]
        clips: list[Tensor | None] = [None] * len(latents)
        if any(is_finite):
            decodable = [row for row, finite in enumerate(is_finite) if finite]
            for row, clip in zip(
                decodable, decoded(self.backbone, latents[decodable].split(1)), strict=True
            ):
                clips[row] = clip
        return clips

    def seed(self, request: Request) -> int:
        return self.config.validation_global_seed if request.seed is None else request.seed

    def file(self, request: Request) -> str:
        return f"{request.name}-{self.seed(request)}.mp4"

    def score_clips(
        self, clips: Sequence[Tensor | None], requests: Sequence[Request]
    ) -> list[dict[str, Any]]:
        """One record per clip: file, prompt, seed, size and scores, plus the error of a reward that failed.

        The size in pixels is the sampled one: files of tiny clips are magnified.
        """
        fps = self.config.fps
        scores = self.reward.score(clips, requests, fps)
        held_out = None
        if self.holdout_reward:
            held_out = self.holdout_reward.score(clips, requests, fps)
        values_by_kind = {
            "scores": scores.named | {"total": scores.total},
            "holdout": held_out.named if held_out else {},
            "gold": gold_metrics(self.gold, clips, requests),
        }

        records = []
        for i, request in enumerate(requests):
            record: dict[str, Any] = {
                "file": self.file(request),
                "prompt": request.text,
                "seed": self.seed(request),
            }
            clip = clips[i]
            if clip is not None:
                record["height"], record["width"] = clip.shape[1:3]
            if request.image:
                record["image"] = str(request.image.path)
            for result in (held_out, scores):
                if result and result.errors and not result.total[i].isfinite():
                    record["error"] = result.errors[0]
            for kind, named in values_by_kind.items():
                record[kind] = finite({name: values[i].item() for name, values in named.items()})
            records.append(record)
        return records


class StageBar(tqdm):
    """The progress bar of a validation, which shows one stage after the other."""

    def begin(self, stage: str, total: int = 1) -> None:
        """Show the next stage, of `total` batches."""
        self.set_description_str(f"validation: {stage}", refresh=False)
        self.unit = "batch"
        self.reset(total)

    def over(self, stage: str, batches: Sequence[Any]) -> Iterator[Any]:
        """The batches of the next stage; each is counted once it is done."""
        self.begin(stage, len(batches))
        for batch in batches:
            yield batch
            self.update()


def validation_sampling(config: Config) -> Sampling:
    """How a resolved configuration samples validation clips."""
    height, _, width = config.validation_fixed_size.lower().partition("x")
    if not (height.isdigit() and width.isdigit()):
        raise ValueError(
            f"validation_fixed_size is {config.validation_fixed_size!r}; "
            "write HEIGHTxWIDTH, such as 480x848"
        )
    return Sampling(
        frames=config.validate_video_length,
        height=int(height),
        width=int(width),
        fps=config.fps,
        shift=config.validation_timestep_shift,
        num_steps=config.validation_num_inference_steps,
        guidance=config.guidance_scale,
        guidance_2=config.guidance_scale_2,
    )


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means and standard errors over the clips that have a value."""
    result: dict[str, Any] = {"count": len(records)}
    for kind, key in RECORD_KEYS.items():
        for name in dict.fromkeys(name for record in records for name in record[key]):
            values = [record[key].get(name) for record in records]
            known = np.array([value for value in values if value is not None], dtype=float)
            result[f"{kind}/{name}"] = math.nan
            result[f"{kind}/{name}_stderr"] = math.nan
            if len(known) > 0:
                result[f"{kind}/{name}"] = known.mean().item()
            if len(known) > 1:
                result[f"{kind}/{name}_stderr"] = float(known.std(ddof=1) / math.sqrt(len(known)))
    result["reward/failed"] = sum(record["scores"]["total"] is None for record in records)
    return result
