"""Pairs, their labels, and the loss: Bradley-Terry with ties."""

import math

import pytest
import torch

from research.tiny.videoreward.pairs import (
    ERROR,
    accuracy,
    captions_of,
    draw_pairs,
)
from research.tiny.videoreward.pool import Pool
from sage_grpo.worlds.shapes.judge import alignment
from sage_grpo.worlds.shapes.scenes import ATTRIBUTES, OPTIONAL, parse


@pytest.fixture(scope="module")
def pool():
    """Judged clips without pixels: random attributes and qualities from two sources."""
    generator = torch.Generator().manual_seed(0)
    classes = [
        torch.randint(len(words), (200,), generator=generator) for words in ATTRIBUTES.values()
    ]
    quality = torch.randn(2, 200, generator=generator)
    return Pool(torch.zeros(200, 1), *quality, torch.stack(classes, 1), torch.arange(200) // 150)


def test_truth_is_what_the_judge_says_about_the_prompt(pool):
    pairs = draw_pairs(pool, 100, seed=1)
    attributes = {name: pool.attributes[:, i] for i, name in enumerate(ATTRIBUTES)}
    named = [parse(prompt) for prompt in pairs.prompts]
    first, second = (
        alignment(
            {name: values[pairs.clips[:, side]] for name, values in attributes.items()}, named
        )
        for side in (0, 1)
    )
    torch.testing.assert_close(pairs.truth[:, 2], first - second)
    torch.testing.assert_close(
        pairs.truth[:, 0], pool.VQ[pairs.clips[:, 0]] - pool.VQ[pairs.clips[:, 1]]
    )
    assert all(set(words) >= set(ATTRIBUTES) - set(OPTIONAL) for words in named)
    assert len({frozenset(words) for words in named}) > 3
    assert (first - second).abs().max() > 0.5


def test_annotators_err_where_clips_are_alike_and_agree_where_they_differ(pool):
    pairs = draw_pairs(pool, 4000, seed=2)
    for i, error in enumerate(ERROR):
        truth, labels = pairs.truth[:, i], pairs.labels[:, i]
        clear = truth.abs() > 4 * error
        assert (labels == truth.sign())[clear].float().mean() > 0.99
        assert 0.3 < (labels == 0)[truth.abs() < 0.5 * error].float().mean() < 0.8
        small = (truth.abs() > 0.2 * error) & (truth.abs() < 1.5 * error)
        assert 0.02 < (labels == -truth.sign())[small].float().mean() < 0.4


def test_half_of_the_pairs_are_of_one_source(pool):
    pairs = draw_pairs(pool, 4000, seed=3)
    alike = pool.source[pairs.clips]
    by_chance = 0.75**2 + 0.25**2
    assert (alike[:, 0] == alike[:, 1]).float().mean().item() == pytest.approx(
        0.5 + 0.5 * by_chance, abs=0.03
    )


def test_captions_say_what_is_there(pool):
    for text, row in zip(captions_of(pool, seed=0), pool.attributes.tolist(), strict=True):
        shown = dict(zip(ATTRIBUTES, row, strict=True))
        assert all(shown[name] == value for name, value in parse(text).items())


def test_accuracy_counts_pairs_that_truly_differ():
    truth, difference = torch.tensor([1.0, -1.0, 0.01, 2.0]), torch.tensor([0.1, 0.2, -5.0, 3.0])
    assert accuracy(difference, truth) == 0.5
    assert accuracy(difference, truth, least=0.1) == pytest.approx(2 / 3)
    assert math.isnan(accuracy(difference, truth, least=9.0))
