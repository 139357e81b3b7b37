"""The perfect judge: picture and motion are told apart, and alignment counts the attributes."""

import pytest
import torch

from sage_grpo.worlds.shapes.damage import DAMAGES
from sage_grpo.worlds.shapes.judge import defects, judge
from sage_grpo.worlds.shapes.oracle import read
from sage_grpo.worlds.shapes.scenes import ATTRIBUTES, captions, render, sample_scenes
from sage_grpo.worlds.shapes.world import as_uint8
from tests.smallest_run import slow

FELT_BY = {
    "noise": "VQ",
    "blur": "VQ",
    "flicker": "VQ",
    "jitter": "MQ",
    "pulse": "MQ",
    "freeze": "MQ",
}
STRENGTHS = {  # light and heavy
    "noise": (0.05, 0.2),
    "blur": (0.75, 1.5),
    "flicker": (0.05, 0.15),
    "jitter": (0.5, 2.0),
    "pulse": (0.05, 0.2),
    "freeze": (0.5, 1.0),
}


@pytest.fixture(scope="module")
def world():
    scenes = sample_scenes(24, torch.Generator().manual_seed(3))
    return scenes, render(scenes, 9, 32, 32)


def test_clips_without_defects_get_about_nothing_off(world):
    scenes, clips = world
    judgement = judge(as_uint8(clips))
    # what 8 bits cost
    assert judgement.VQ.min() > -0.1
    assert judgement.MQ.min() > -0.05
    for name in ATTRIBUTES:
        assert torch.equal(judgement.attributes[name], getattr(scenes, name))
    assert judgement.alignment(captions(scenes)).eq(1).all()


@pytest.mark.parametrize(
    "damage",
    [damage if damage in ("noise", "freeze") else slow(damage) for damage in FELT_BY],
)
def test_each_damage_is_felt_by_its_score_and_hardly_by_the_other(world, damage):
    """Slow: more kinds of damage for each score."""
    felt = FELT_BY[damage]
    other = {"VQ": "MQ", "MQ": "VQ"}[felt]
    generator = torch.Generator().manual_seed(1)
    _, clips = world
    light, heavy = (
        judge(as_uint8(DAMAGES[damage](clips, strength, generator)))
        for strength in STRENGTHS[damage]
    )
    drops = {name: -getattr(heavy, name).mean().item() for name in (felt, other)}
    assert getattr(heavy, felt).mean() < getattr(light, felt).mean() - 0.1
    assert drops[felt] > 0.5
    assert drops[felt] > 1.3 * drops[other]


def test_a_jump_of_known_size_is_measured(world):
    """In one frame of nine, the object is 2 of 32 pixels to the right of its path."""
    _, clips = world
    jumping = clips.clone()
    jumping[:, 4] = torch.cat([clips[:, 4, :, :1].expand(-1, -1, 2, -1), clips[:, 4, :, :-2]], 2)
    picture, wobble, swelling = defects(jumping, read(clips, [""] * len(clips)).scenes)
    assert wobble.median().item() == pytest.approx(2 / 32 / 3, rel=0.05)
    assert swelling.median() < 0.01
    assert picture.median() < 0.002


def test_alignment_is_the_share_of_named_attributes(world):
    scenes, clips = world
    judgement = judge(as_uint8(clips[:2]))
    words = {name: ATTRIBUTES[name][getattr(scenes, name)[0]] for name in ATTRIBUTES}
    colour = next(name for name in ATTRIBUTES["colour"] if name != words["colour"])
    prompts = [f"a {words['size']} {colour} thing", ""]
    with pytest.raises(ValueError, match="thing"):
        judgement.alignment(prompts)
    prompts[0] = f"a {words['size']} {colour} circle moving {words['direction']}"
    correct = 3 if words["shape"] == "circle" else 2
    assert judgement.alignment(prompts).tolist() == pytest.approx([correct / 4, 1.0])
