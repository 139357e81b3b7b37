"""Metrics of an update: sums per denoising step."""

import math

import pytest
import torch

from sage_grpo.algo.grpo import policy_stats
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.train.metrics import SUMS, UpdateStats


class Other(Ranks):
    """As if a second rank had seen the same pairs, with ratios that deviate by 1 % at most."""

    def sum(self, values):
        return 2 * values

    def max(self, values):
        return values.clamp(min=0.01)


def filled() -> UpdateStats:
    """Three pairs: two at step 0, one at step 2 of 3."""
    steps, values = torch.tensor([0, 2, 0]), torch.tensor([1.0, 5.0, 3.0])
    stats = UpdateStats.empty(3, torch.device("cpu"))
    stats.add(steps, {name: values * (i + 1) for i, name in enumerate(SUMS[1:])})
    log_ratio = torch.tensor([0.5, 0.0, -0.1]).double()
    return UpdateStats(stats.policy + policy_stats(log_ratio, values, steps, 3, 0.2), stats.sums)


def test_means_are_over_pairs_and_by_step():
    stats = filled()
    assert stats.mean("loss") == pytest.approx(3.0) and stats.mean("kl_anchor") == pytest.approx(9.0)
    record = stats.record()
    assert record["policy/objective"] == pytest.approx(6.0) and record["kl/rollout"] == pytest.approx(12.0)
    assert record["per_step"]["count"] == [2, 0, 1]
    grad_v = record["per_step"]["grad_v"]
    assert grad_v[0] == pytest.approx(10.0) and math.isnan(grad_v[1]) and grad_v[2] == pytest.approx(25.0)


def test_parts_and_ranks_add_up_but_the_largest_deviation_stays_the_largest():
    once, twice, over = filled(), filled() + filled(), filled().over(Other(0, 2, torch.device("cpu")))
    for more in (twice, over):
        assert more.record()["per_step"]["count"] == [4, 0, 2]
        assert more.mean("loss") == pytest.approx(once.mean("loss"))
        assert more.policy.max_deviation[0] == once.policy.max_deviation[0] == pytest.approx(math.expm1(0.5))
    assert over.policy.max_deviation.tolist()[1:] == [0.01, 0.01]
