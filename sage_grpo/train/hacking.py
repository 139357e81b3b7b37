"""Reward hacking: the reward that is trained rises while one that training never sees falls.

Clips of the first validation and of a later one are compared one by one, same prompt and seed. A change counts where
the 95 % interval of its mean leaves out 0. A record is an entry of clips.json; the scores of a hold-out weigh 1 each.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sage_grpo.intervals import Interval, interval

Record = Mapping[str, Any]


def trained(record: Record) -> float:
    total = record["scores"]["total"]
    return math.nan if total is None else total


def held_out(record: Record) -> float:
    """NaN where there is none, or one is missing."""
    values = record.get("holdout", {}).values()
    return math.nan if None in values or not values else math.fsum(values)


def change(before: Iterable[Record], after: Iterable[Record], value: Callable[[Record], float]) -> Interval:
    """Mean of after - before over the clips that both have."""
    known = {(record["prompt"], record["seed"]): value(record) for record in before}
    return interval(value(record) - known.get((record["prompt"], record["seed"]), math.nan) for record in after)


def validations(folder: Path) -> dict[int, list[Record]]:
    """The clips of every validation of a run, by iteration."""
    files = sorted(folder.glob("validation/step-*/clips.json"))
    return {int(file.parent.name.removeprefix("step-")): json.loads(file.read_bytes()) for file in files}


def divergence(folder: Path, step: int) -> str:
    """What is wrong with the validation at `step` of a run folder, in a sentence; empty where nothing is."""
    found = validations(folder)
    if step not in found:  # its clips did not fit on the disk
        return ""
    first = min(found)
    reward, holdout = (change(found[first], found[step], value) for value in (trained, held_out))
    if reward.sign < 1 or holdout.sign > -1:
        return ""
    shown = [
        f"{c.mean:+.3g} (95 % interval {c.mean - c.half:+.3g} to {c.mean + c.half:+.3g})" for c in (reward, holdout)
    ]
    return (
        f"reward hacking: from iteration {first} to {step} the trained reward changed by {shown[0]} and the held-out "
        f"one by {shown[1]}; look at the clips, go back to an earlier checkpoint, change reward_weights or the KL"
    )
