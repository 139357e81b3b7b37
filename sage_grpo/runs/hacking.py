"""Reward hacking: the training reward rises while a held-out reward, which training never sees, falls.

Two validations are compared clip by clip, same prompt and seed. A change counts if the 95 % interval of its mean
excludes 0.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from sage_grpo.intervals import MIN_PAIRS, Interval, interval
from sage_grpo.runs.clips import Clip, pair_clips, read_validations
from sage_grpo.runs.history import RunError


def change(before: Sequence[Clip], after: Sequence[Clip], name: str) -> Interval:
    """Mean of after - before, of `reward` or `held_out`, over the clips that both contain."""
    pairs = pair_clips(before, after)
    return interval(getattr(new, name) - getattr(old, name) for old, new in pairs)


def divergence(folder: Path, step: int, series: Collection[int] | None = None) -> str | None:
    """How the validation at `step` of a run folder shows reward hacking, in one sentence; empty if it shows none.

    None if there is nothing to compare: no earlier validation, or too few clips with both rewards.
    series: iterations whose validations had the same yardstick, the only ones to compare it with; None: all.
    """
    try:
        validations = read_validations(folder)
        if series is not None:
            validations = {n: validations[n] for n in validations if n in series or n == step}
        return _divergence(validations, step)
    except RunError as error:  # such as a listing that a crash has cut short; training must go on
        print(f"note: not checked for reward hacking: {error}", file=sys.stderr, flush=True)
        return None


def _divergence(validations: Mapping[int, Sequence[Clip]], step: int) -> str | None:
    earlier = [n for n in sorted(validations) if n < step]
    if step not in validations or not earlier:  # a full disk keeps a validation from being saved
        return None

    first = earlier[0]

    def held_out_gain(n: int) -> float:
        return change(validations[first], validations[n], "held_out").mean

    best = max(earlier, key=held_out_gain)  # a held-out reward may rise before it falls
    for start in dict.fromkeys([first, best]):
        reward = change(validations[start], validations[step], "reward")
        held_out = change(validations[start], validations[step], "held_out")
        if min(reward.count, held_out.count) < MIN_PAIRS:
            raise RunError(f"that needs {MIN_PAIRS} clips in each validation")
        if reward.sign > 0 > held_out.sign:
            return (
                f"reward hacking: from iteration {start} to {step} the trained reward changed by {_shown(reward)}"
                f" and the held-out one by {_shown(held_out)};"
                " look at the clips, go back to an earlier checkpoint, change reward_weights or the KL"
            )
    return ""


def _shown(change: Interval) -> str:
    low = change.mean - change.half
    high = change.mean + change.half
    return f"{change.mean:+.3g} (95 % interval {low:+.3g} to {high:+.3g})"
