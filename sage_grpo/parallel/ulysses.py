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

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, key, value -> output


class _AllToAll(torch.autograd.Function):
    """Exchange rows of dim 0: `sent[r]` of them go to rank r, `received[r]` come from it. The gradient goes back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.received = received
        ctx.sent = sent
        ctx.group = group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        returned = _AllToAll.apply(gradient, ctx.sent, ctx.received, ctx.group)
        return returned, None, None, None


class _Join(torch.autograd.Function):
    """All ranks' (B, n, D) -> full (B, N, D). Every rank has the same loss, so each keeps its part of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes = sizes
        ctx.rank = rank
        padded = F.pad(part, (0, 0, 0, max(sizes) - part.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group)
        unpadded = [part[:, :size] for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(unpadded, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        own_part = gradient.split(ctx.sizes, dim=1)[ctx.rank]
        return own_part, None, None, None


def part_sizes(length: int, count: int) -> list[int]:
    """Split `length` into `count` sizes, as evenly as possible; the first ones take the remainder."""
    size, remainder = divmod(length, count)
    return [size + 1] * remainder + [size] * (count - remainder)


class Shares:
    """How the tokens of one forward are split across ranks. Without a group, this rank has them all."""

    def __init__(
        self, num_video: int, num_context: int, kernel: Attend, group: dist.ProcessGroup | None
    ) -> None:
        """kernel: attention over full sequences, (B, S, H, E) each -> (B, S, H, E)."""
        self.kernel = kernel
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        count = 1 if group is None else dist.get_world_size(group)
        self.video = part_sizes(num_video, count)  # tokens of each rank
        self.context = part_sizes(num_context, count)

    def own_video(self, tokens: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of all video tokens, or of a table with a row for each."""
        return tokens if self.group is None else tokens.split(self.video, dim)[self.rank]

    def own_first(self, count: int) -> int:
        """How many of the first `count` video tokens this rank has: they are the first of its own."""
        before = sum(self.video[: self.rank])
        return max(0, min(count - before, self.video[self.rank]))

    def own_context(self, tokens: Tensor) -> Tensor:
        """This rank's part (B, k, D) of all context tokens (B, K, D)."""
        return tokens if self.group is None else tokens.split(self.context, 1)[self.rank]

    def join_video(self, part: Tensor) -> Tensor:
        """All video tokens (B, N, D), from this rank's part (B, n, D)."""
        return part if self.group is None else _Join.apply(part, self.video, self.rank, self.group)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention over all tokens, from this rank's (B, s, H, E) each -> (B, s, H, E)."""
        if self.group is None:
            return self.kernel(query, key, value)
        sizes = [n + k for n, k in zip(self.video, self.context, strict=True)]  # s of each rank
        count = len(sizes)
        own_sizes = [sizes[self.rank]] * count

        # all heads of some tokens -> some heads, h = H / count, of all tokens
        joint = torch.stack([query, key, value])
        outgoing = rearrange(joint, "three b s (count h) e -> (count s) three b h e", count=count)
        incoming = _AllToAll.apply(outgoing, sizes, own_sizes, self.group)  # (S, 3, B, h, E)
        out = self.kernel(*rearrange(incoming, "s three b h e -> three b s h e"))

        # and back
        outgoing = rearrange(out, "b s h e -> s b h e")
        incoming = _AllToAll.apply(outgoing, own_sizes, sizes, self.group)
        return rearrange(incoming, "(count s) b h e -> b s (count h) e", count=count)
