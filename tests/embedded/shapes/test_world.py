"""The moving-shapes world's interface for training and tools."""

import pytest
import torch

from embedded.shapes.oracle import read
from embedded.shapes.world import FLOOR_CLIPS, ShapesWorld, round_trip
from sage_grpo.models.hunyuan15.backbone import Hunyuan15

PROMPTS = ["a large red circle moving left on a black background", 'a small green letter "T" moving up']


def test_drawn_clips_show_their_prompts_and_follow_from_the_seed():
    world = ShapesWorld()
    clips = world.draw(PROMPTS, 9, 32, 32, seed=3)
    assert clips.shape == (2, 9, 32, 32, 3) and clips.dtype == torch.uint8
    assert torch.equal(clips, world.draw(PROMPTS, 9, 32, 32, seed=3))
    assert not torch.equal(clips, world.draw(PROMPTS, 9, 32, 32, seed=4))
    gold = world.gold(clips, PROMPTS)
    assert gold["match"].tolist() == [1.0, 1.0] and gold["distance"].max() < 2e-3  # of rounding to bytes
    assert world.gold(clips, PROMPTS[::-1])["match"].tolist() == [0.0, 0.0]


def test_gold_is_what_the_oracle_reads():
    world = ShapesWorld()
    clips = world.draw(PROMPTS, 9, 32, 32, seed=3).flip(3)
    gold, reading = world.gold(clips, PROMPTS), read(clips, PROMPTS)
    assert list(gold) == ["match", "distance", "prompt_distance"]
    for name, values in gold.items():
        assert values.dtype == torch.float64 and torch.equal(values, getattr(reading, name).double())
    assert gold["match"][0] == 0 and gold["prompt_distance"][0] > 0.01  # mirrored, it moves right


def test_its_reward_and_its_words():
    world = ShapesWorld()
    assert (world.name, world.reward) == ("shapes", "shapes")
    with pytest.raises(ValueError, match="unknown word 'purple'"):
        world.check([*PROMPTS, "a purple circle"])


def test_round_trip_pairs_clips_with_what_the_vae_makes_of_them(tiny_folder):
    backbone = Hunyuan15(tiny_folder)
    clips, decoded, sentences = round_trip(backbone, 2)
    assert clips.shape == decoded.shape == (2, 9, 32, 32, 3) and len(sentences) == 2
    assert torch.equal(decoded, backbone.decode(backbone.encode_video(clips)))


def test_the_floor_is_the_mean_distance_after_the_vae(tiny_folder):
    backbone, world = Hunyuan15(tiny_folder), ShapesWorld()
    _, decoded, sentences = round_trip(backbone, FLOOR_CLIPS)
    expected = world.gold(decoded, sentences)["distance"].mean().item()
    assert world.vae_floor(backbone) == {"distance": expected} and expected > 0.05  # the VAE is untrained
