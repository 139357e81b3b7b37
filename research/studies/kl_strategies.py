"""KL strategies (the paper's Figure 8) at weights that keep the policy equally close to the base model.

At equal weights the strategies go unequally far from the base model, so a comparison would tell strong from weak rather
than one strategy from another. Therefore each strategy is run at a few weights with a seed that no result reports, its
path KL to the base model (research/studies/path_kl.py) is read at the end, and the weight is taken at which it would be
half of what training without a KL reaches. At half, every strategy has to act; the KL of the recipe's own weight could
turn out to be that of no KL, and then all arms would be alike.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from research.studies import records
from research.studies.questions import FIXED_KL, MOVING, NO_KL, PUSHED, STEPWISE, Flags

SEARCH = "kl_weights"  # names of the two studies
COMPARED = "kl_strategies"
FREE = "none"  # the strategy that has no weight to search, and sets the target
STRATEGIES: dict[str, Flags] = {
    "dual moving": {},
    FREE: NO_KL,
    "fixed": FIXED_KL,
    "step-wise": STEPWISE,
    "moving": MOVING,
    "dual fixed": {"use_moving_KL": False},
}
# Weights of the search, around those that halve the path KL in a pilot (research/log.md). It was shorter and had
# smaller batches, in which a KL probably acts more strongly: the ranges reach higher than lower.
WEIGHTS: dict[str, tuple[float, ...]] = {
    "dual moving": (0.01, 0.06, 0.3),
    "fixed": (0.003, 0.03, 0.3),
    "step-wise": (0.1, 2.0, 30.0),
    "moving": (0.01, 0.06, 0.3),
    "dual fixed": (0.003, 0.03, 0.3),
}
SHARE = 0.5  # of the path KL that training without a KL reaches: the target
# iterations, of two updates each: with one, the KL to the rollout's policy has no gradient
STEPS = 30
# 5 denoising steps as in the recipe, validated only at start and end: 64 runs have to fit into 12 minutes
FLAGS: dict[str, Any] = PUSHED | {
    "num_sampling_steps": 5, "validation_num_inference_steps": 5, "max_steps": STEPS, "validation_interval": STEPS,
    "save_interval": 0, "log_interval": 6,
}  # fmt: skip

MATCHED = (0.8, 1.25)  # of the path KL of an arm over that of the one it is compared with
SETTINGS = ", ".join(f"`{name} {value}`" for name, value in FLAGS.items())
REGISTERED = f"""**KL strategies.** Runs of `{SEARCH}` and `{COMPARED}` have
{SETTINGS}.
There are two updates per rollout, because with one the KL to the rollout's policy has no gradient, at the learning
rate with which the first edition asked this question; all arms get equally many. The KL that training logs is to
its anchor, which may have moved. So each run ends with its path KL to the base model (research/studies/path_kl.py):
for each held-out prompt one path of the final, averaged weights, from noise that is the same in all runs; the sum
over exploring steps of |mean - mean_base|^2 / (2 std^2), averaged over the elements of a clip.

- *Search.* Training without a KL, and five strategies at three weights each, with seed 101. The target is {SHARE:g}
  of the path KL of the run without a KL, so that every strategy has to act. A strategy gets the weight whose path
  KL is nearest to the target: between two neighboring weights on both sides of it, by log KL linear in log weight,
  to two digits; otherwise the nearest of the three. If the run without a KL has to be stopped there is no target,
  and the study must be registered again.
- *Measures.* Those above, and the path KL. An arm is matched if the geometric mean over seeds of its path KL over
  that of dual moving KL is between {MATCHED[0]:g} and {MATCHED[1]:g}.
- *Decisions.* By the rule above, with dual moving KL as the first arm and Holm over five comparisons. A difference
  of an arm that is not matched is reported as one at unequal KL, and decides nothing about the strategy. Training
  without a KL has nothing to match: it shows what a KL changes. The paper's claim that dual moving KL is the best
  holds here if it beats a matched strategy in reward or gold match and no matched strategy beats it in either. It
  fails if one does. All else is undecided.
- *Budget.* 64 runs, four times 16 side by side. An iteration of 128 clips in 5 steps took 1.16 s with eight runs. With
  twice that for 16, and 80 s for the start, two validations, the oracle and the path KL, both of which are guesses,
  four times 150 s are 10 minutes; by the rate of the other studies, 19. Seeds run in order, all arms of a seed
  together, so that a comparison cut short stays paired.
"""


def searched() -> dict[str, Flags]:
    """Training without a KL, and each strategy at each weight of its search."""
    arms = {
        f"{strategy}, {weight:g}": {**STRATEGIES[strategy], "kl_weight": weight}
        for strategy, weights in WEIGHTS.items()
        for weight in weights
    }
    return {FREE: NO_KL} | arms


def compared(weights: Mapping[str, float]) -> dict[str, Flags]:
    """The strategies, each at its weight once that has been found."""
    arms = {strategy: dict(flags) for strategy, flags in STRATEGIES.items()}
    for strategy, weight in weights.items():
        arms[strategy]["kl_weight"] = weight
    return arms


def missing(weights: Mapping[str, float]) -> list[str]:
    """Strategies whose weight has not been found yet."""
    return [strategy for strategy in WEIGHTS if strategy not in weights]


def matching_weight(kls: Mapping[float, float], target: float) -> float:
    """The weight whose KL is nearest to the target, of the searched ones and of those between two neighbors.

    kls: the KL that each weight reached. Between neighbors of which one is above the target and one below, log KL is
    taken as linear in log weight; the result has two significant digits.
    """
    reached = sorted((weight, kl) for weight, kl in kls.items() if math.isfinite(kl) and kl > 0)
    if not reached:
        return math.nan
    for (low, first), (high, second) in pairwise(reached):
        if min(first, second) <= target <= max(first, second) and first != second:
            share = math.log(target / first) / math.log(second / first)
            return float(f"{low * (high / low) ** share:.2g}")
    nearest, _ = min(reached, key=lambda pair: abs(math.log(pair[1] / target)))
    return nearest


def choose(results: Path) -> dict[str, Any]:
    """The target, the KLs that the search reached, and the weight of each strategy whose search is finished."""
    free_kl = math.nan  # of training without a KL
    kls: dict[str, dict[float, float]] = {strategy: {} for strategy in WEIGHTS}  # by weight
    runs = records.read_all(results).values()
    for record in (record for record in runs if record["study"] == SEARCH):
        kl = records.path_kl(record)
        if record["arm"] == FREE:
            free_kl = kl
        else:
            strategy = record["arm"].rpartition(", ")[0]
            kls[strategy][record["config"]["kl_weight"]] = kl

    target = SHARE * free_kl
    reached: dict[str, Any] = {FREE: free_kl}
    weights = {}
    for strategy, by_weight in kls.items():
        reached[strategy] = {f"{weight:g}": kl for weight, kl in by_weight.items()}
        weight = matching_weight(by_weight, target)
        searched_all = len(by_weight) == len(WEIGHTS[strategy])
        if searched_all and math.isfinite(weight * free_kl):
            weights[strategy] = weight
    return {"target": target, "reached": reached, "weights": weights}
