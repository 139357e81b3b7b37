"""Which clips are compared, and what each rater is shown.

Pairs follow from the study's seed, which may be known; order and sides from its secret, which no browser receives.

A trial is one showing of a pair to a rater. Some pairs are shown twice, with sides swapped and other pairs in between,
which measures how consistent a rater is.
"""

import hashlib
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from sage_grpo.tools.prefer.study import Study, StudyClip, StudyError

APART = 5  # trials between the two showings of a pair, where there are as many

Pair = tuple[int, int]


def candidates(clips: Sequence[StudyClip]) -> list[Pair]:
    """All pairs that can be compared.

    With several systems: clips of different ones with the same prompt, seed and number. With one: clips of a prompt.
    """
    several = len({clip.system for clip in clips}) > 1
    groups: dict[tuple, list[int]] = defaultdict(list)
    for index, clip in enumerate(clips):
        key = (clip.prompt, clip.seed, clip.number) if several else (clip.prompt,)
        groups[key].append(index)

    pairs = []
    for members in groups.values():
        for a, b in combinations(members, 2):
            if not several or clips[a].system != clips[b].system:
                pairs.append((a, b))
    if not pairs:
        reason = (
            "have no prompt and seed in common" if several else "hold one clip of each prompt alone"
        )
        raise StudyError(f"the clips {reason}, so nothing can be compared")
    return pairs


def draw(
    clips: Sequence[StudyClip], pairs: Sequence[Pair], count: int | None, seed: int
) -> list[Pair]:
    """`count` random pairs (None: all), spread evenly over systems and prompts: each has one before any has two."""
    rng = random.Random(seed)
    by_group: dict[tuple, list[Pair]] = defaultdict(list)
    for a, b in pairs:
        systems = tuple(sorted((clips[a].system, clips[b].system)))
        by_group[clips[a].prompt, systems].append((a, b))
    groups = list(by_group.values())
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)

    rounds = max(len(group) for group in groups)
    drawn = [group[turn] for turn in range(rounds) for group in groups if turn < len(group)]
    return drawn[:count]


def least_certain(
    clips: Sequence[StudyClip], pairs: Sequence[Pair], count: int | None, names: Sequence[str]
) -> list[Pair]:
    """`count` pairs (None: all), those first whose rewards, the sums of the named scores, differ least."""

    def difference(pair: Pair) -> float:
        first, second = (sum(clips[i].scores[name] for name in names) for i in pair)
        return abs(first - second)

    missing = [clip for clip in clips for name in names if name not in clip.scores]
    if missing:
        raise StudyError(
            f"the clip of prompt {missing[0].prompt!r:.80} with seed {missing[0].seed} has no score: "
            "the reward failed on it; repeat the command to score it again"
        )
    return sorted(pairs, key=difference)[:count]


# what a rater is shown


@dataclass(frozen=True)
class Trial:
    """One showing of a pair."""

    pair: int  # index into the study's pairs
    swapped: bool  # whether the pair's first clip is on the right
    repeat: bool = False  # whether this is the second showing


def trials(study: Study, rater: str) -> list[Trial]:
    """All trials of a rater, in order; each rater has an order and sides of their own."""
    key = study.secret or study.seed  # old studies have no secret
    digest = hashlib.sha256(f"{key}\0{rater}".encode(errors="replace")).digest()
    rng = random.Random(digest)
    order = list(range(len(study.pairs)))
    if not study.ordered:
        rng.shuffle(order)
    first_showings = [Trial(pair, swapped=rng.random() < 0.5) for pair in order]

    num_repeats = math.floor(study.repeat * len(order) + 0.5)
    repeated = set(rng.sample(order, num_repeats))
    schedule = list(first_showings)
    for trial in first_showings:
        if trial.pair not in repeated:
            continue
        again = Trial(trial.pair, swapped=not trial.swapped, repeat=True)
        earliest = min(schedule.index(trial) + 1 + APART, len(schedule))
        schedule.insert(rng.randint(earliest, len(schedule)), again)
    return schedule
