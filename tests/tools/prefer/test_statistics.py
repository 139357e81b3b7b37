"""The intervals hold what they promise in simulated studies; agreement and numbers of pairs against known values."""

import math

import numpy as np
import pytest

from sage_grpo.tools.prefer.statistics import (
    MANY_RATERS,
    Share,
    krippendorff,
    more_prompts,
    pairs_for,
    share,
)

STUDIES = 1000
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(60)  # expectations over a normal distribution


def answers_of(generator, d, theta):
    """Outcomes (1, 0, 1/2) for advantages `d`, by Bradley-Terry with ties."""
    u = generator.random(len(d))
    first = 1 / (1 + theta * np.exp(-d))
    second = 1 / (1 + theta * np.exp(d))
    return np.where(u < first, 1.0, np.where(u < first + second, 0.0, 0.5))


def expected_outcome(prompt_spread, by_rater, advantage, theta):
    """The true share: over all prompts, and over the given raters."""
    d = advantage + prompt_spread * NODES[:, None] + by_rater[None]
    outcome = 0.5 + 0.5 * (1 / (1 + theta * np.exp(-d)) - 1 / (1 + theta * np.exp(d)))
    return float((WEIGHTS[:, None] * outcome).sum() / WEIGHTS.sum() / len(by_rater))


@pytest.mark.parametrize("prompts, per_prompt, raters, prompt_spread, rater_spread, advantage, theta", [
    (60, 1, 1, 1.0, 0.0, 0.0, 2.0),  # one rater, a pair per prompt
    (60, 1, 1, 1.0, 0.0, 2.5, 1.2),  # almost all answers agree
    (30, 4, 1, 1.5, 0.0, 0.5, 1.5),  # several clips of a prompt
    (40, 1, 3, 1.0, 0.7, 0.5, 5.0),  # three raters, many ties
    (50, 1, 8, 1.0, 0.8, 0.3, 2.0),  # from here on raters stand for all raters
    (50, 1, 10, 0.3, 0.8, 0.3, 2.0),
    (50, 1, 15, 1.0, 0.2, 0.3, 2.0),
])  # fmt: skip
def test_95_percent_intervals_cover_93_to_97(
    prompts, per_prompt, raters, prompt_spread, rater_spread, advantage, theta
):
    """Simulated studies: taste differs by prompt and by rater, and people judge by Bradley-Terry with ties."""
    generator = np.random.default_rng(7)
    everybody = generator.normal(0, rater_spread, 20000)
    expected = expected_outcome(prompt_spread, everybody, advantage, theta)
    prompt = np.repeat(np.arange(prompts), per_prompt * raters)
    rater = np.tile(np.arange(raters), prompts * per_prompt)
    covered = 0
    for _ in range(STUDIES):
        by_rater = generator.normal(0, rater_spread, raters)
        if raters < MANY_RATERS:  # then the interval is about these raters
            expected = expected_outcome(prompt_spread, by_rater, advantage, theta)
        by_prompt = generator.normal(0, prompt_spread, prompts)
        values = answers_of(generator, advantage + by_prompt[prompt] + by_rater[rater], theta)
        interval = share(values, prompt.tolist(), rater.tolist())
        covered += interval.low <= expected <= interval.high
    assert 0.93 <= covered / STUDIES <= 0.97


@pytest.mark.parametrize("prompts", [2, 3, 4, 5])
@pytest.mark.parametrize("chance", [0.5, 0.7])
def test_intervals_of_few_prompts_are_wide_enough(prompts, chance):
    """Their means are often the same: then the variance between them is 0, but for rounding."""
    generator = np.random.default_rng(5)
    prompt = np.repeat(np.arange(prompts), 3).tolist()
    studies = [
        share((generator.random(3 * prompts) < chance).astype(float), prompt) for _ in range(500)
    ]
    assert np.mean([study.low <= chance <= study.high for study in studies]) >= 0.93


@pytest.mark.parametrize("answers", [[1, 1, 0], [1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]])
@pytest.mark.parametrize("prompts", [2, 3, 4])
@pytest.mark.parametrize("raters", [1, MANY_RATERS])
def test_prompts_of_equal_means_still_have_an_interval(answers, prompts, raters):
    values = np.tile(np.repeat(answers, raters), prompts).astype(float)
    prompt = np.arange(prompts).repeat(len(answers) * raters)
    rater = np.tile(np.arange(raters), prompts * len(answers))
    interval = share(values, prompt.tolist(), rater.tolist())
    assert interval.high - interval.low > 0.4
    assert not interval.decided


def test_repeated_prompts_widen_an_interval_and_ties_narrow_it():
    generator = np.random.default_rng(0)
    values = generator.integers(0, 2, 100).astype(float)
    alone = share(values, range(100))
    repeated = share(values.repeat(4), np.arange(100).repeat(4).tolist())
    assert (repeated.mean, repeated.clusters) == (alone.mean, 100)
    assert (repeated.low, repeated.high) == pytest.approx((alone.low, alone.high))
    with_ties = np.where(np.arange(100) % 2, values, 0.5)
    tied = share(with_ties, range(100))
    assert tied.high - tied.low < alone.high - alone.low


@pytest.mark.parametrize("values, low_above, high_below", [
    ([1.0] * 20, 0.8, 1.01),
    ([0.0] * 20, -0.01, 0.2),
    ([0.5] * 20, 0.25, 0.75),
])  # fmt: skip
def test_answers_that_all_agree_still_have_an_interval(values, low_above, high_below):
    interval = share(values, range(20))
    assert low_above < interval.low < interval.high < high_below


def test_too_little_says_nothing():
    assert math.isnan(share([], []).mean)
    one_prompt = share([1.0, 1.0], ["a", "a"])
    assert (one_prompt.low, one_prompt.high, one_prompt.decided) == (0.0, 1.0, False)


# numbers of pairs


def test_as_many_pairs_as_promised_decide_a_study():
    generator = np.random.default_rng(3)
    count = pairs_for(0.65, ties=0.2)
    chances = [0.55, 0.25, 0.2]  # wins and half of the ties: 0.65
    studies = [
        share(generator.choice([1.0, 0.0, 0.5], count, p=chances), range(count)) for _ in range(600)
    ]
    power = np.mean([study.decided and study.mean > 0.5 for study in studies])
    assert 0.76 <= power <= 0.86


@pytest.mark.parametrize("rate, ties", [(0.5, 0.0), (0.95, 0.2), (0.6, 1.0)])
def test_impossible_win_rates_are_rejected(rate, ties):
    with pytest.raises(ValueError, match="cannot be told"):
        pairs_for(rate, ties)


def test_how_many_more_prompts():
    """As many answers about each as now: three."""
    assert more_prompts(Share(0.7, 0.6, 0.8, 300, 100), 100) == 0
    assert more_prompts(Share(0.5, 0.4, 0.6, 300, 100), 100) is None
    more = more_prompts(Share(0.55, 0.45, 0.65, 300, 100), 100)
    assert more == math.ceil(100 * (2.8016 * 0.1 / 1.96 / 0.05) ** 2 - 100)
    assert more_prompts(share([], []), 0) is None


# agreement


@pytest.mark.parametrize("units, alpha", [
    ([[1, 1], [0, 0], [1, 1]], 1.0),
    ([[1, 0], [0, 1]], -0.5),
    ([[1], [0]], math.nan),
    ([[1, 1], [1, 1]], math.nan),  # no variation to agree about
])  # fmt: skip
def test_krippendorffs_alpha(units, alpha):
    assert krippendorff(units) == pytest.approx(alpha, nan_ok=True)


def test_alpha_of_random_answers_is_0():
    units = np.random.default_rng(0).choice([0, 0.5, 1], (4000, 3))
    assert abs(krippendorff(units.tolist())) < 0.03
