"""Sequence parallelism (Ulysses, arXiv 2309.14509): each rank holds some tokens and, in attention, some heads.

Shares may have any length, including 0. Every rank of the group ends with the full output and the same loss, so the
gradient of a parameter is the SUM over the group.

Shapes: B clips, N video and K context tokens in total, n and k on this rank, s = n + k, S = N + K, H heads of E.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class _AllToAll(torch.autograd.Function):
    """Exchange rows of dim 0: `given[r]` of them go to rank r, `taken[r]` come from it. The gradient goes back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, taken: list[int], given: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way_back = (given, taken, group)
        out = x.new_empty(sum(taken), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), taken, given, group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(gradient, *ctx.way_back), None, None, None


class _Join(torch.autograd.Function):
    """All ranks' (B, n, D) -> full (B, N, D). Every rank has the same loss, so each keeps its part of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes, ctx.rank = sizes, rank
        padded = F.pad(part, (0, 0, 0, max(sizes) - part.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group)
        return torch.cat([p[:, :size] for p, size in zip(parts, sizes, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.split(ctx.sizes, dim=1)[ctx.rank], None, None, None


def part_sizes(length: int, count: int) -> list[int]:
    """Split `length` as evenly as possible; the first ranks take the remainder."""
    return [length // count + (rank < length % count) for rank in range(count)]


class Shares:
    """How the tokens of one forward are split across ranks. Without a group, this rank has them all."""

    def __init__(
        self, num_video: int, num_context: int, kernel: Attend, group: dist.ProcessGroup | None
    ) -> None:
        """kernel: attention over full sequences, (B, S, H, E) each -> (B, S, H, E)."""
        self.kernel, self.group = kernel, group
        count, self.rank = (
            (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        )
        self.video, self.context = (
            part_sizes(num_video, count),
            part_sizes(num_context, count),
        )  # of each rank

    def own_video(self, tokens: Tensor, dim: int = 1) -> Tensor:
        return tokens if self.group is None else tokens.split(self.video, dim)[self.rank]

    def own_context(self, tokens: Tensor) -> Tensor:
        return tokens if self.group is None else tokens.split(self.context, 1)[self.rank]

    def join_video(self, part: Tensor) -> Tensor:
        return part if self.group is None else _Join.apply(part, self.video, self.rank, self.group)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention over all tokens, from this rank's (B, s, H, E) each -> (B, s, H, E)."""
        if self.group is None:
            return self.kernel(query, key, value)
        totals = [n + k for n, k in zip(self.video, self.context, strict=True)]
        count, mine = len(totals), totals[self.rank]
        joint = torch.stack([query, key, value])
        outgoing = rearrange(joint, "three b s (count h) e -> (count s) three b h e", count=count)
        incoming = _AllToAll.apply(outgoing, totals, [mine] * count, self.group)  # (S, 3, B, h, E)
        out = self.kernel(*rearrange(incoming, "s three b h e -> three b s h e"))
        back = _AllToAll.apply(
            rearrange(out, "b s h e -> s b h e"), [mine] * count, totals, self.group
        )
        return rearrange(back, "(count s) b h e -> b s (count h) e", count=count)
