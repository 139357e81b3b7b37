"""Clips of a rollout or a validation: decoded from their latents, and measured by the world's oracle."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Backbone, BrokenClip

# gold metrics (B,) of uint8 clips (B, F, H, W, 3) and their requests, by name
Gold = Callable[[Tensor, Sequence[Request]], dict[str, Tensor]]


def decoded(backbone: Backbone, latents: Sequence[Tensor]) -> list[Tensor | None]:
    """uint8 clips (F, H, W, 3) on the CPU, of latents (1, ...) each; None where pixels are not finite."""
    try:
        clips = backbone.decode(torch.cat(latents)).cpu()
    except BrokenClip:
        if len(latents) == 1:
            return [None]
        # find the broken one
        return [clip for latent in latents for clip in decoded(backbone, [latent])]
    return [clip.clone() for clip in clips]  # clone: a clip is sent to other ranks, not the batch


def gold_metrics(
    gold: Gold | None, clips: Sequence[Tensor | None], requests: Sequence[Request]
) -> dict[str, Tensor]:
    """Gold metrics of clips by name, (N,) each, NaN for missing clips; empty if the world has no oracle."""
    rows = [row for row, clip in enumerate(clips) if clip is not None]
    if gold is None or not rows:
        return {}
    measured = gold(torch.stack([clips[row] for row in rows]), [requests[row] for row in rows])
    missing = torch.full((len(clips),), math.nan, dtype=torch.float64)
    index = torch.tensor(rows)
    return {name: missing.index_copy(0, index, v.double()) for name, v in measured.items()}
