from dataclasses import replace

import pytest
import torch

from sage_grpo.worlds.shapes import oracle
from sage_grpo.worlds.shapes.damage import DAMAGES
from sage_grpo.worlds.shapes.oracle import _reduced, read
from sage_grpo.worlds.shapes.scenes import ATTRIBUTES, captions, render, sample_scenes
from tests.smallest_run import slow

STRENGTHS = {
    "noise": (0, 0.02, 0.1, 0.3),
    "blur": (0, 0.5, 1, 2),
    "jitter": (0, 0.25, 1, 4),
    "fade": (0, 0.1, 0.5, 1),
}
EACH_DAMAGE = [name if name == "noise" else slow(name) for name in STRENGTHS]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("num_clips, at_a_time", [(30, 64), slow(12, 8)])
def test_exact_on_rendered_clips(monkeypatch, num_clips, at_a_time):
    """Slow: more clips than are read at a time."""
    monkeypatch.setattr(oracle, "CHUNK", at_a_time)
    scenes = sample_scenes(num_clips, seeded())
    reading = read(render(scenes, 9, 32, 32), [""] * num_clips)
    for name in ATTRIBUTES:
        assert torch.equal(reading.attributes[name], getattr(scenes, name)), name
    assert reading.distance.max() < 1e-5
    for name in ("x", "y", "radius", "travel"):
        torch.testing.assert_close(
            getattr(reading.scenes, name), getattr(scenes, name), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize(
    ("frames", "height", "width"), [(13, 48, 40), (5, 12, 12), (5, 16, 24), slow(9, 128, 96)]
)
def test_exact_at_other_lengths_and_resolutions(frames, height, width):
    """Slow: large frames."""
    scenes = sample_scenes(8, seeded())
    reading = read(render(scenes, frames, height, width), captions(scenes))
    assert reading.match.all()
    assert reading.prompt_distance.max() < 1e-5


def test_search_works_on_a_faithful_reduction_of_large_frames():
    scenes = sample_scenes(16, seeded())
    small = _reduced(render(scenes, 5, 96, 144))
    assert small.shape == (16, 5, 32, 48, 3)
    assert (small - render(scenes, 5, 32, 48)).square().mean().sqrt() < 0.02
    clips = render(scenes, 5, 48, 40)
    assert _reduced(clips) is clips


def test_quantized_clips_are_off_by_the_rounding_alone():
    scenes = sample_scenes(12, seeded())
    clips = (render(scenes, 9, 32, 32) * 255).round().to(torch.uint8)
    reading = read(clips, captions(scenes))
    assert reading.match.all()
    assert reading.distance.max() < 0.002


@pytest.mark.parametrize("damage", EACH_DAMAGE)
def test_distance_grows_with_damage_and_never_exceeds_it(damage):
    scenes = sample_scenes(10, seeded())
    clean = render(scenes, 9, 32, 32)
    before = torch.full((10,), -1.0)
    for strength in STRENGTHS[damage]:
        damaged = DAMAGES[damage](clean, strength, seeded(1))
        reading = read(damaged, captions(scenes))
        assert (reading.distance <= reading.prompt_distance).all()
        # the clean clip lies on the manifold and on its prompt's part of it: the nearest point cannot be farther
        assert (
            reading.prompt_distance <= (damaged - clean).square().flatten(1).mean(1).sqrt() + 2e-4
        ).all()
        assert reading.distance.mean() > before.mean()
        assert (reading.distance > before).float().mean() > 0.9
        before = reading.distance
    assert before.mean() > 0.04


@pytest.mark.parametrize("damage", EACH_DAMAGE)
def test_attributes_survive_slight_damage(damage):
    scenes = sample_scenes(12, seeded())
    damaged = DAMAGES[damage](render(scenes, 9, 32, 32), STRENGTHS[damage][1], seeded(1))
    assert read(damaged, captions(scenes)).match.all()


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_one_wrong_attribute_breaks_the_match_and_is_far_from_the_prompt(name):
    scenes = sample_scenes(6, seeded())
    wrong = replace(scenes, **{name: (getattr(scenes, name) + 1) % len(ATTRIBUTES[name])})
    reading = read(render(scenes, 9, 32, 32), captions(wrong))
    assert not reading.match.any()
    assert reading.distance.max() < 1e-5
    assert reading.prompt_distance.min() > 0.01
    assert torch.equal(getattr(reading.prompt_scenes, name), getattr(wrong, name))


def test_what_a_partial_prompt_leaves_open_costs_nothing():
    scenes = sample_scenes(6, seeded())
    clips = render(scenes, 9, 32, 32)
    words = [ATTRIBUTES["colour"][index] for index in scenes.colour.tolist()]
    free = read(clips, [f"a {word}" for word in words])
    assert free.match.all()
    assert free.prompt_distance.max() < 1e-5
    empty = read(clips, [""] * 6)
    assert empty.match.all()
    assert torch.equal(empty.prompt_distance, empty.distance)


def test_prompt_distance_is_the_least_over_what_the_prompt_leaves_open():
    scenes = sample_scenes(6, seeded())
    clips = render(scenes, 9, 32, 32)
    others = sample_scenes(6, seeded(1))
    partial = read(clips, [f"a {ATTRIBUTES['colour'][index]}" for index in others.colour.tolist()])
    full = read(clips, captions(others))
    assert (partial.prompt_distance <= full.prompt_distance + 1e-6).all()
    direct = (render(others, 9, 32, 32) - clips).square().flatten(1).mean(1).sqrt()
    assert (full.prompt_distance <= direct + 1e-6).all()


def test_reading_does_not_depend_on_the_batch(monkeypatch):
    monkeypatch.setattr(oracle, "CHUNK", 8)
    scenes = sample_scenes(12, seeded())  # more than one chunk
    clips = DAMAGES["noise"](render(scenes, 5, 32, 32), 0.1, seeded(1))
    together = read(clips, [""] * 12).distance
    torch.testing.assert_close(
        read(clips[9:11], [""] * 2).distance, together[9:11], atol=1e-6, rtol=0
    )


def test_junk_is_read_without_complaint_and_lies_far_off():
    clips = torch.cat(
        [
            torch.rand(2, 5, 32, 32, 3, generator=seeded()),
            torch.zeros(1, 5, 32, 32, 3),
            torch.ones(1, 5, 32, 32, 3),
        ]
    )
    reading = read(clips, captions(sample_scenes(4, seeded())))
    assert reading.distance.isfinite().all()
    assert reading.prompt_distance.isfinite().all()
    assert (reading.distance[:2] > 0.25).all()
    assert (reading.distance[2:] > 0.03).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda clips: clips[0], "shape"),
        (lambda clips: clips[:0], "B >= 1"),
        (lambda clips: torch.where(clips > 0.8, torch.nan, clips), "NaN"),
        (lambda clips: clips * 2 - 1, "clamped"),
        (lambda clips: clips * 255, "clamped"),
        (lambda clips: clips[:, :4], "4n\\+1"),
    ],
)
def test_unreadable_clips_are_refused(change, message):
    clips = change(render(sample_scenes(3, seeded()), 5, 32, 32))
    with pytest.raises(ValueError, match=message):
        read(clips, [""] * len(clips))


def test_prompts_must_fit_the_clips():
    clips = render(sample_scenes(2, seeded()), 5, 32, 32)
    with pytest.raises(ValueError, match="1 prompts for 2 clips"):
        read(clips, ["a red circle"])
    with pytest.raises(ValueError, match="unknown word 'purple'"):
        read(clips, ["a red circle", "a purple circle"])
