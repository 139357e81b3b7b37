"""The moving-shapes world's interface for training and tools."""

import pytest
import torch
from PIL import Image

from sage_grpo.data.images import read_image
from sage_grpo.data.requests import Request
from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.worlds.shapes import world as shapes
from sage_grpo.worlds.shapes.oracle import read
from sage_grpo.worlds.shapes.world import ShapesWorld, round_trip

PROMPTS = [
    "a large red circle moving left on a black background",
    'a small green letter "T" moving up',
]


def requests(prompts):
    return [Request(text) for text in prompts]


def test_drawn_clips_show_their_prompts_and_follow_from_the_seed():
    world = ShapesWorld()
    clips = world.draw(PROMPTS, 9, 32, 32, seed=3)
    assert clips.shape == (2, 9, 32, 32, 3)
    assert clips.dtype == torch.uint8
    assert torch.equal(clips, world.draw(PROMPTS, 9, 32, 32, seed=3))
    assert not torch.equal(clips, world.draw(PROMPTS, 9, 32, 32, seed=4))
    gold = world.gold(clips, requests(PROMPTS))
    assert gold["match"].tolist() == [1.0, 1.0]
    assert gold["distance"].max() < 2e-3  # of rounding to bytes
    assert world.gold(clips, requests(PROMPTS[::-1]))["match"].tolist() == [0.0, 0.0]


def test_gold_is_what_the_oracle_reads():
    world = ShapesWorld()
    clips = world.draw(PROMPTS, 9, 32, 32, seed=3).flip(3)
    gold = world.gold(clips, requests(PROMPTS))
    reading = read(clips, PROMPTS)
    assert list(gold) == ["match", "distance", "prompt_distance"]
    for name, values in gold.items():
        assert values.dtype == torch.float64
        assert torch.equal(values, getattr(reading, name).double())
    # mirrored, it moves right
    assert gold["match"][0] == 0
    assert gold["prompt_distance"][0] > 0.01


def test_the_oracle_reads_whether_clip_and_image_agree(tmp_path):
    """Another object or place is seen; noise that is not part of the object is not."""
    world = ShapesWorld()
    clips = world.draw(PROMPTS, 9, 48, 48, seed=3)
    with_images = []
    for number, text in enumerate(PROMPTS):
        path = tmp_path / f"{number}.png"
        Image.fromarray(clips[number, 0].numpy()).save(path)
        with_images.append(Request(text, image=read_image(path, "")).sized(48, 48))
    noise = torch.randint(-20, 20, clips.shape, generator=torch.Generator().manual_seed(0))
    variants = {
        "same": clips,
        "noisy": (clips + noise).clamp(0, 255).to(torch.uint8),
        "moved": clips.roll(3, 2),
        "recolored": clips[..., [2, 0, 1]],
        "elsewhere": world.draw(PROMPTS, 9, 48, 48, seed=4),
    }
    gold = {name: world.gold(variant, with_images) for name, variant in variants.items()}
    matching = [name for name in gold if gold[name]["image_match"].all()]
    missing = [name for name in gold if not gold[name]["image_match"].any()]
    assert matching == ["same", "noisy"]
    assert missing == ["moved", "recolored", "elsewhere"]
    assert gold["same"]["image_distance"].max() < 2e-3
    assert gold["elsewhere"]["image_match"].dtype == torch.float64


def test_its_reward_and_its_words():
    world = ShapesWorld()
    assert (world.name, world.reward) == ("shapes", "shapes")
    with pytest.raises(ValueError, match="unknown word 'purple'"):
        world.check([*PROMPTS, "a purple circle"])


def test_round_trip_pairs_clips_with_what_the_vae_makes_of_them(tiny_folder):
    backbone = Hunyuan15(tiny_folder)
    clips, decoded, sentences = round_trip(backbone, 2)
    assert clips.shape == decoded.shape == (2, 9, 32, 32, 3)
    assert len(sentences) == 2
    assert torch.equal(decoded, backbone.decode(backbone.encode_video(clips)))


@pytest.mark.slow
def test_the_floor_is_the_mean_distance_after_the_vae(tiny_folder):
    """Slow: encodes, decodes and reads clips."""
    backbone = Hunyuan15(tiny_folder)
    world = ShapesWorld()
    _, decoded, sentences = round_trip(backbone, shapes.FLOOR_CLIPS)
    expected = world.gold(decoded, requests(sentences))["distance"].mean().item()
    assert world.vae_floor(backbone) == {"distance": expected}
    assert expected > 0.05  # the VAE is untrained
