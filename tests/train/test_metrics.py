"""Metrics of an update: sums per denoising step."""

import math

import pytest
import torch

from sage_grpo.algo.grpo import policy_metrics
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.train.metrics import POLICY, SUMS, UpdateStats


class Other(Ranks):
    """As if a second rank had seen the same pairs, with ratios that deviate by 1 % at most."""

    def sum(self, values):
        return 2 * values

    def gather(self, values):
        return torch.cat([values, torch.full_like(values, 0.01)])


def filled() -> UpdateStats:
    """Three pairs: two at step 0, one at step 2 of 3."""
    steps, values = torch.tensor([0, 2, 0]), torch.tensor([1.0, 5.0, 3.0])
    stats = UpdateStats(3, torch.device("cpu"))
    columns = {name: values * (i + 1) for i, name in enumerate(SUMS[1:])}
    stats.add(steps, columns | policy_metrics(torch.tensor([0.5, 0.0, -0.1]).double(), values, 0.2))
    return stats


def test_means_are_over_pairs_and_by_step():
    stats = filled()
    assert stats.mean("loss") == pytest.approx(3.0) and stats.mean("kl_anchor") == pytest.approx(
        9.0
    )
    record = stats.record()
    assert record["policy/objective"] == pytest.approx(6.0) and record[
        "kl/rollout"
    ] == pytest.approx(12.0)
    assert record["per_step"]["count"] == [2, 0, 1]
    grad_v = record["per_step"]["grad_v"]
    assert (
        grad_v[0] == pytest.approx(10.0)
        and math.isnan(grad_v[1])
        and grad_v[2] == pytest.approx(25.0)
    )


def test_parts_and_ranks_add_up_but_the_largest_deviation_stays_the_largest():
    once, twice, over = filled(), filled(), filled()
    twice += filled()
    over.sum_over(Other(0, 2, torch.device("cpu")))
    for more in (twice, over):
        assert more.record()["per_step"]["count"] == [4, 0, 2]
        assert more.mean("loss") == pytest.approx(once.mean("loss"))
        assert more.max_deviation[0] == once.max_deviation[0] == pytest.approx(math.expm1(0.5))
    assert over.max_deviation.tolist()[1:] == [0.01, 0.01]


def ratios(pairs: slice = slice(None)) -> UpdateStats:
    """Five pairs at steps 0 and 2 of 4, of which some are clipped."""
    log_ratio = torch.tensor([1.0, 1.2, 0.8, 1.05, 0.7], dtype=torch.float64).log()[pairs]
    columns = policy_metrics(
        log_ratio, torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])[pairs], clip_range=0.1
    )
    stats = UpdateStats(4, torch.device("cpu"))
    stats.add(
        torch.tensor([0, 0, 2, 2, 2])[pairs],
        dict.fromkeys(SUMS, torch.zeros_like(log_ratio)) | columns,
    )
    return stats


def test_policy_metrics_by_hand():
    record = ratios().record()
    per_step = record.pop("per_step")
    assert record["policy/ratio_mean"] == pytest.approx(0.95)
    assert record["policy/ratio_max_deviation"] == pytest.approx(0.3)
    assert record["policy/clip_fraction"] == pytest.approx(3 / 5)
    assert (
        record["policy/clip_high"]
        == pytest.approx(1 / 5)
        == pytest.approx(record["policy/clip_low"])
    )
    log_ratio = torch.tensor([1.0, 1.2, 0.8, 1.05, 0.7], dtype=torch.float64).log()
    approx_kl = log_ratio.exp() - 1 - log_ratio
    assert record["policy/log_ratio_mean"] == pytest.approx(log_ratio.mean().item())
    assert record["policy/approx_kl"] == pytest.approx(approx_kl.mean().item())
    assert per_step["ratio_mean"] == pytest.approx([1.1, math.nan, 2.55 / 3, math.nan], nan_ok=True)
    assert per_step["ratio_max_deviation"] == pytest.approx(
        [0.2, math.nan, 0.3, math.nan], nan_ok=True
    )
    assert per_step["clip_fraction"] == pytest.approx([0.5, math.nan, 2 / 3, math.nan], nan_ok=True)
    assert per_step["approx_kl"][0] == pytest.approx(approx_kl[:2].mean().item())


def test_policy_metrics_of_parts_add_up():
    total, whole = ratios(slice(0, 3)), ratios()
    total += ratios(slice(3, 5))
    torch.testing.assert_close(total.sums, whole.sums)
    assert torch.equal(total.max_deviation, whole.max_deviation)


def test_metrics_of_nothing_are_not_numbers():
    for stats in (ratios(slice(0)), UpdateStats(3, torch.device("cpu"))):
        record = stats.record()
        assert all(
            math.isnan(record[f"policy/{name}"])
            for name in (*POLICY, "loss", "ratio_max_deviation")
        )
