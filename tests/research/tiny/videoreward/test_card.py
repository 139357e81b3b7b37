"""The card of the embedded reward: the oracle gets full marks, a blind reward guesses, the page is its figures."""

import json
from pathlib import Path

import pytest
import torch

from research.tiny.videoreward import card, learn, pool
from research.tiny.videoreward.pairs import SCORES, draw_pairs
from sage_grpo.models.registry import open_backbone
from sage_grpo.rewards.videoalign.reward import VideoAlign
from sage_grpo.worlds.shapes.judge import judge
from sage_grpo.worlds.shapes.scenes import ATTRIBUTES

SHIPPED = Path("assets/tiny/VideoReward")


class Oracle:
    """Scores as the judge does."""

    def score(self, clips, prompts, fps):
        found = judge(torch.stack(clips))
        return {"VQ": found.VQ, "MQ": found.MQ, "TA": found.alignment(prompts)}


class Blind:
    """Scores by the order in which clips come."""

    def score(self, clips, prompts, fps):
        generator = torch.Generator().manual_seed(len(prompts[0]))
        return {name: torch.randn(len(clips), generator=generator) for name in SCORES}


@pytest.fixture(scope="module")
def clips():
    backbone = open_backbone("assets/tiny")
    return pool.build_pool(
        backbone, {"rendered": 24, "damaged": 0, "VAE": 24, "sampled": 0}, 5, torch.device("cpu")
    )


@pytest.mark.slow
def test_the_oracle_as_reward_is_right(clips):
    """Slow: reads many clips; test_oracle.py reads a few of each kind."""
    rows = card.pair_accuracy(Oracle(), clips, draw_pairs(clips, 24, 1), 8.0)
    assert (rows["all"]["VQ"], rows["all"]["TA"], rows["all"]["pairs"]) == (1, 1, 24)
    assert rows["all"]["MQ"] > 0.8  # the truth knows the path; the oracle has to find it
    assert sum(rows[name]["pairs"] for name in rows if name not in ("all", "annotators")) == 24
    assert all(0.5 < rows["annotators"][name] <= 1 for name in SCORES)
    assert card.word_accuracy(Oracle(), clips, 8.0, 4) == dict.fromkeys(ATTRIBUTES, 1)


def test_a_blind_reward_guesses(clips):
    rows = card.pair_accuracy(Blind(), clips, draw_pairs(clips, 200, 1), 8.0)
    assert all(0.3 < rows["all"][name] < 0.7 for name in SCORES)


def test_every_damage_lowers_what_the_oracle_says():
    found = card.damage_effects(Oracle(), (9, 32, 32), 8.0, 8)
    assert all(row["VQ"] < 0 or row["MQ"] < 0 for row in found.values()) and all(
        row["fooled"] < 0.3 for row in found.values()
    )


@pytest.mark.slow
def test_the_page_shows_the_figures_that_were_measured(monkeypatch, tmp_path):
    """Slow: the whole program; its measures are tested with the oracle and a blind reward."""
    monkeypatch.setattr(pool, "SAMPLERS", pool.SAMPLERS[:1])
    learn.new_reward(tmp_path / "VideoReward", 0, 56 * 56)
    (tmp_path / "VideoReward" / "training.json").write_text('{"command": "python -m learned"}')
    card.main(
        [
            "--reward",
            str(tmp_path / "VideoReward"),
            "--clips",
            "16",
            "--pairs",
            "20",
            "--device",
            "cpu",
        ]
    )
    page = (tmp_path / "VideoReward" / "README.md").read_text()
    figures = json.loads((tmp_path / "VideoReward" / "card.json").read_text())
    assert f"| all | {figures['pairs']['all']['VQ']:.1%} |" in page and "python -m learned" in page
    assert (
        f"| blur | {figures['damages']['blur']['VQ']:+.2f} |" in page and len(figures["words"]) == 6
    )


@pytest.mark.slow
def test_the_card_of_the_shipped_reward_can_be_measured_again(clips):
    """A part of it, on fewer clips. Slow: the shipped weights."""
    figures, reward = json.loads((SHIPPED / "card.json").read_text()), VideoAlign(SHIPPED)
    rows = card.pair_accuracy(reward, clips, draw_pairs(clips, 60, 1), 8.0)
    expected = sum(figures["pairs"][name]["TA"] for name in ("both rendered", "both VAE")) / 2
    assert abs(rows["all"]["TA"] - expected) < 0.05  # two clips of sixty
    found = card.damage_effects(reward, (9, 48, 48), 8.0, 16)
    for name, score in {"noise": "VQ", "flicker": "VQ", "jitter": "MQ", "pulse": "MQ"}.items():
        assert abs(found[name][score] - figures["damages"][name][score]) < 0.5, name
    assert (
        card.table(figures["pairs"], dict.fromkeys(SCORES, ".1%") | {"pairs": "d"})
        in SHIPPED.joinpath("README.md").read_text()
    )
