"""Batches: which clips an iteration samples, and which of them each rank runs through the model together.

A prompt is named by its position in the list of training requests, `prompt_index`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sage_grpo import rng
from sage_grpo.models.backbone import Conditioning
from sage_grpo.models.embeddings import alike


class ClipId(NamedTuple):
    """A clip of an iteration."""

    prompt_index: int
    sample: int  # number among the prompt's clips in this iteration


MicroBatch = tuple[ClipId, ...]  # clips that run through the model together


class GroupId(NamedTuple):
    """A group of clips whose rewards are compared."""

    prompt_index: int
    number: int  # among the prompt's groups in this iteration


def group_of(clip: ClipId, group_size: int) -> GroupId:
    return GroupId(clip.prompt_index, clip.sample // group_size)


def draw_prompts(iteration: int, per_iteration: int, num_prompts: int, seed: int) -> list[int]:
    """Prompt indices of an iteration: each epoch goes through all prompts in a new order."""
    numbers = range(iteration * per_iteration, (iteration + 1) * per_iteration)
    epochs = {number // num_prompts for number in numbers}
    orders = {
        epoch: rng.permutation(num_prompts, seed, "prompt_order", step=epoch) for epoch in epochs
    }
    return [int(orders[number // num_prompts][number % num_prompts]) for number in numbers]


def plan_micro_batches(
    prompt_indices: Sequence[int],
    group_size: int,
    batch_size: int,
    dp_rank: int,
    micro_batch_size: int | None,
) -> list[MicroBatch]:
    """The micro-batches of one rank: its `batch_size` rows of the list of all clips, group by group.

    If a prompt appears twice in an iteration, its sample numbers continue, so no noise is used twice.
    """
    clips = []
    sampled = dict.fromkeys(prompt_indices, 0)
    for prompt_index in prompt_indices:
        first = sampled[prompt_index]
        clips += [ClipId(prompt_index, first + number) for number in range(group_size)]
        sampled[prompt_index] += group_size

    rank_clips = clips[dp_rank * batch_size : (dp_rank + 1) * batch_size]
    return split_clips(rank_clips, micro_batch_size or min(batch_size, group_size))


def split_clips(clips: Sequence[ClipId], size: int) -> list[MicroBatch]:
    """Micro-batches of `size` consecutive clips."""
    return [tuple(clips[start : start + size]) for start in range(0, len(clips), size)]


def join_micro_batches(
    micro_batches: Sequence[MicroBatch],
    conditions: Mapping[int, Conditioning],
    prompts_per_forward: int,
) -> Sequence[MicroBatch]:
    """Join up to `prompts_per_forward` micro-batches whose prompts are equally long.

    `conditions` has the encoded prompts by their index. The clips of a group stay together, on which
    `Trainer.advantages` relies.
    """
    if prompts_per_forward == 1:
        return micro_batches
    encoded = [conditions[micro_batch[0].prompt_index] for micro_batch in micro_batches]
    return [
        tuple(clip for number in numbers for clip in micro_batches[number])
        for numbers in alike(encoded, prompts_per_forward)
    ]
