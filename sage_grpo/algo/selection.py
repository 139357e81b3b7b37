"""Down-sampling of a group: train its best and its worst clips only (arXiv 2504.13818).

All clips are sampled and scored, and advantages are those of the full group. The clips in between have the smallest
advantages, so they teach least, but cost as much as any other after the reward.
Shapes: N rollouts, group after group.
"""

import torch
from torch import Tensor


def extreme_rows(values: Tensor, usable: Tensor, group_size: int, count: int) -> Tensor:
    """Rows (N / group_size * count,) of the clips to train, ascending: `count` of each group.

    values: advantages (N,). usable: (N,) bool, whether a clip has an advantage: false if its reward failed, or if its
    group has fewer than two rewards or only equal ones.

    The usable clips of a group are sorted by falling advantage, equal ones by their number. The first half of `count`
    is taken from the front, the second from the back; if `count` is odd, the front gives one more. If a group has
    fewer usable clips than `count`, all of them are taken, and the rest are its first other clips, with advantage 0:
    every group trains equally many clips, so that shapes and the work of each rank stay the same.
    """
    if not 1 <= count <= group_size:
        raise ValueError(f"train_clips is {count}; it must be 1 to {group_size}, the group size")
    chosen = []
    groups = values.view(-1, group_size).unbind()
    groups_usable = usable.view(-1, group_size).unbind()
    for group_values, group_usable in zip(groups, groups_usable, strict=True):
        by_advantage = group_values.argsort(descending=True, stable=True)
        candidates = by_advantage[group_usable[by_advantage]]
        if len(candidates) >= count:
            from_back = count // 2
            from_front = count - from_back
            best = candidates[:from_front]
            worst = candidates[len(candidates) - from_back :]
            chosen.append(torch.cat([best, worst]))
        else:
            others = (~group_usable).nonzero().flatten()
            chosen.append(torch.cat([candidates, others[: count - len(candidates)]]))
    first_rows = torch.arange(0, len(values), group_size)[:, None]
    return (torch.stack(chosen) + first_rows).sort(dim=1).values.flatten()
