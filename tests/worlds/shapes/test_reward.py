from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from sage_grpo.worlds.shapes.damage import DAMAGES
from sage_grpo.worlds.shapes.oracle import read
from sage_grpo.worlds.shapes.reward import (
    ShapesReward,
    measure_look,
    measure_track,
    outline_distances,
)
from sage_grpo.worlds.shapes.scenes import (
    ATTRIBUTES,
    BACKGROUNDS,
    PALETTE,
    captions,
    object_mask,
    render,
    sample_scenes,
    table,
)

STRENGTHS = {
    "noise": (0, 0.05, 0.1, 0.3),
    "blur": (0, 0.5, 1, 2),
    "jitter": (0, 0.25, 1, 4),
    "fade": (0, 0.1, 0.5, 1),
}
FELT_BY = {
    "noise": ("VQ", "MQ", "TA"),
    "blur": ("VQ", "TA"),
    "jitter": ("VQ", "MQ", "TA"),
    "fade": ("VQ", "MQ", "TA"),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def as_bytes(clips):
    return (clips * 255).round().to(torch.uint8)


def score(clips, prompts):
    return ShapesReward().score(as_bytes(clips), prompts, fps=8.0)


def total(scores):
    return scores["VQ"] + scores["MQ"] + scores["TA"]


@pytest.fixture(scope="module")
def world():
    scenes = sample_scenes(48, seeded())
    return scenes, render(scenes, 9, 32, 32), captions(scenes)


def test_perfect_clips_score_about_one_each(world):
    _, clips, prompts = world
    for values in score(clips, prompts).values():
        assert values.shape == (48,)
        assert values.mean().item() == pytest.approx(1, abs=0.3)
        assert values.std() < 0.3


@pytest.mark.parametrize("damage", STRENGTHS)
def test_reward_falls_with_every_kind_of_damage(world, damage):
    _, clips, prompts = world
    scores = [
        score(DAMAGES[damage](clips, strength, seeded(1)), prompts)
        for strength in STRENGTHS[damage]
    ]
    for lighter, heavier in pairwise(scores):
        assert (total(heavier) < total(lighter)).float().mean() > 0.9
        for name in FELT_BY[damage]:
            assert heavier[name].mean() < lighter[name].mean() - 0.02, name


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_one_wrong_word_lowers_text_alignment_alone(world, name):
    scenes, clips, prompts = world
    right = score(clips, prompts)
    wrong = replace(scenes, **{name: (getattr(scenes, name) + 1) % len(ATTRIBUTES[name])})
    answer = score(clips, captions(wrong))
    assert (right["TA"] - answer["TA"]).min() > 0.1
    torch.testing.assert_close(answer["VQ"], right["VQ"])
    torch.testing.assert_close(answer["MQ"], right["MQ"])


def test_outlines_are_told_apart_by_their_moments(world):
    scenes, clips, _ = world
    distances = outline_distances(measure_track(measure_look(clips).mask))
    assert torch.equal(distances.argmin(1), scenes.shape)


def test_each_defect_of_colour_lowers_visual_quality(world):
    _, clips, prompts = world
    back = clips[:, :1, :1, :1]
    blink = (0.8 + 0.2 * (torch.arange(9) % 2))[:, None, None, None]
    texture = 0.05 * (torch.arange(32) % 2)[:, None]
    hue = torch.linspace(-0.15, 0.15, 32)[:, None] * torch.tensor([1.0, -1.0, 0.0])
    perfect = score(clips, prompts)["VQ"]
    pale = score(back + 0.3 * (clips - back), prompts)["VQ"]
    assert (pale < perfect - 0.2).all()
    for edit in (
        back + blink * (clips - back),
        (clips - texture).clamp(0, 1),
        (clips + hue).clamp(0, 1),
    ):
        assert (score(edit, prompts)["VQ"] < perfect - 0.3).all()


def test_an_object_that_swells_loses_motion_quality(world):
    scenes, clips, prompts = world
    radius = scenes.radius * torch.linspace(0.8, 1.2, 9)[:, None]
    swelling = torch.stack(
        [render(replace(scenes, radius=radius[f]), 9, 32, 32)[:, f] for f in range(9)], 1
    )
    assert (score(swelling, prompts)["MQ"] < score(clips, prompts)["MQ"] - 0.4).all()


def test_an_empty_clip_looks_like_no_outline():
    assert outline_distances(measure_track(torch.zeros(1, 5, 32, 32))).min() > 2


def test_a_clip_without_motion_loses_motion_quality(world):
    _, clips, prompts = world
    still = clips[:, 4:5].expand_as(clips)
    assert (score(still, prompts)["MQ"] < score(clips, prompts)["MQ"] - 0.4).all()


def test_scores_spread_inside_a_group_of_similar_clips(world):
    _, clips, prompts = world
    group = clips[:1].expand(16, -1, -1, -1, -1)
    group = torch.cat(
        [DAMAGES["jitter"](clip[None], 0.1 * i, seeded(i)) for i, clip in enumerate(group)]
    )
    group = torch.cat(
        [DAMAGES["noise"](clip[None], 0.01 * (i % 4), seeded(i)) for i, clip in enumerate(group)]
    )
    scores = score(group, prompts[:1] * 16)
    assert scores["VQ"].std() > 0.1
    assert scores["MQ"].std() > 0.1
    assert len(total(scores).unique()) == 16


def test_partial_prompts_are_judged_by_what_they_name(world):
    scenes, clips, _ = world
    short = captions(scenes, seeded(2))
    named = score(clips, short)["TA"]
    assert named.mean().item() == pytest.approx(1, abs=0.3)
    assert torch.equal(score(clips, [""] * 48)["TA"], torch.zeros(48))
    sizes = [f"a {ATTRIBUTES['size'][index]}" for index in scenes.size.tolist()]
    swapped = [f"a {ATTRIBUTES['size'][1 - index]}" for index in scenes.size.tolist()]
    assert (score(clips, sizes)["TA"] > score(clips, swapped)["TA"] + 0.5).all()


def test_hard_edges_raise_the_reward_and_leave_the_manifold(world):
    scenes, clips, prompts = (part[:16] for part in world)
    inside = (object_mask(scenes, 9, 32, 32) > 0.5)[..., None]
    front, back = (table(colours, clips) for colours in (PALETTE, BACKGROUNDS))
    edited = torch.where(
        inside,
        front[scenes.colour][:, None, None, None],
        back[scenes.background][:, None, None, None],
    )
    gain = total(score(edited, prompts)) - total(score(clips, prompts))
    before, after = (read(as_bytes(version), prompts) for version in (clips, edited))
    assert gain.mean() > 0.3
    assert (gain > 0).float().mean() > 0.9
    assert (after.distance > before.distance + 0.01).all()
    assert (after.prompt_distance > before.prompt_distance + 0.01).all()


@pytest.mark.parametrize("value", [0, 128, 255])
def test_scores_of_junk_are_finite_and_bad(world, value):
    _, _, prompts = world
    blank = torch.full((4, 5, 16, 24, 3), value, dtype=torch.uint8)
    noise = torch.randint(0, 256, blank.shape, generator=seeded(value), dtype=torch.uint8)
    for clips in (blank, noise):
        scores = ShapesReward().score(clips, prompts[:4], fps=8.0)
        assert all(values.isfinite().all() for values in scores.values())
        assert (total(scores) < 0).all()
        assert (scores["MQ"] < 0).all()
        assert (scores["TA"] < -1).all()


def test_other_sizes_lists_and_repeatability():
    scenes = sample_scenes(24, seeded(3))
    clips = as_bytes(render(scenes, 13, 48, 40))
    first = ShapesReward().score(clips, captions(scenes), fps=8.0)
    listed = ShapesReward().score(list(clips), captions(scenes), fps=24)
    for name, values in first.items():
        assert torch.equal(values, listed[name])
        assert values.mean().item() == pytest.approx(1, abs=0.3)
    alone = ShapesReward().score(clips[5:6], captions(scenes[5:6]), fps=8.0)
    torch.testing.assert_close(alone["TA"], first["TA"][5:6])


@pytest.mark.parametrize(
    ("clips", "prompts", "fps", "message"),
    [
        (torch.zeros(1, 5, 16, 16, 3), ["a red circle"], 8, "uint8"),
        (
            torch.zeros(2, 5, 16, 16, 3, dtype=torch.uint8),
            ["a red circle"],
            8,
            "2 clips, 1 prompts",
        ),
        (
            [torch.zeros(n, 16, 16, 3, dtype=torch.uint8) for n in (5, 9)],
            ["a", "a"],
            8,
            "one shape at a time",
        ),
        (
            torch.zeros(1, 5, 16, 16, 3, dtype=torch.uint8),
            ["a purple circle"],
            8,
            "unknown word 'purple'",
        ),
        (torch.zeros(1, 5, 16, 16, 3, dtype=torch.uint8), ["a red circle"], 0, "fps is 0"),
    ],
)
def test_bad_input_is_refused(clips, prompts, fps, message):
    with pytest.raises(ValueError, match=message):
        ShapesReward().score(clips, prompts, fps)
