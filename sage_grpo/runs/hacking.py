"""Reward hacking: the training reward rises while a held-out reward, which training never sees, falls.

Clips of the first validation and of a later one are compared one by one, same prompt and seed. A change counts if the
95 % interval of its mean excludes 0. Each held-out score has weight 1.
"""

import math
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path

from sage_grpo.intervals import Interval, interval
from sage_grpo.runs.clips import Clip, pair_clips, read_validations
from sage_grpo.runs.history import RunError

trained = attrgetter("reward")


def held_out(clip: Clip) -> float:
    """Total held-out score of a clip; NaN if there is none or one is missing."""
    values = [value for name, value in clip.values.items() if name.startswith("holdout/")]
    return math.fsum(values) if values else math.nan


def change(before: Sequence[Clip], after: Sequence[Clip], value: Callable[[Clip], float]) -> Interval:
    """Mean of after - before over the clips that both contain."""
    return interval(value(new) - value(old) for old, new in pair_clips(before, after))


def divergence(folder: Path, step: int) -> str:
    """What is wrong with the validation at `step` of a run folder, in one sentence; empty if nothing is."""
    try:
        found = read_validations(folder)
    except RunError as error:  # a listing that a crash has cut short must not stop the training
        print(f"note: not checked for reward hacking: {error}", file=sys.stderr, flush=True)
        return ""
    if step not in found:  # its clips were not saved: the disk was full
        return ""
    first = min(found)
    reward, holdout = (change(found[first], found[step], value) for value in (trained, held_out))
    if reward.sign < 1 or holdout.sign > -1:
        return ""
    ends = [(c.mean, c.mean - c.half, c.mean + c.half) for c in (reward, holdout)]
    shown = [f"{mean:+.3g} (95 % interval {low:+.3g} to {high:+.3g})" for mean, low, high in ends]
    return (
        f"reward hacking: from iteration {first} to {step} the trained reward changed by {shown[0]} and the held-out "
        f"one by {shown[1]}; look at the clips, go back to an earlier checkpoint, change reward_weights or the KL"
    )
