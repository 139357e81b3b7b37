from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sage_grpo.worlds.shapes.fit import parameters, with_parameters
from sage_grpo.worlds.shapes.scenes import (
    ATTRIBUTES,
    BACKGROUNDS,
    PALETTE,
    RADIUS,
    TRAVEL,
    captions,
    object_mask,
    parse,
    render,
    sample_scenes,
    scenes_from_prompt,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def scene(**named):
    """One scene with the named classes given as words."""
    classes = {name: torch.tensor([ATTRIBUTES[name].index(word)]) for name, word in named.items()}
    return sample_scenes(1, seeded(), classes)


def test_sampling_is_deterministic_and_covers_every_class():
    scenes = sample_scenes(500, seeded())
    again = sample_scenes(500, seeded())
    assert all(torch.equal(value, getattr(again, name)) for name, value in scenes.items())
    for name, words in ATTRIBUTES.items():
        assert getattr(scenes, name).unique().tolist() == list(range(len(words)))


def test_continuous_numbers_keep_to_their_class():
    scenes = sample_scenes(2000, seeded())
    for values, classes, ranges in (
        (scenes.radius, scenes.size, RADIUS),
        (scenes.travel, scenes.speed, TRAVEL),
    ):
        for index, (low, high) in enumerate(ranges.values()):
            chosen = values[classes == index]
            assert low <= chosen.min() < low + 0.1 * (high - low)
            assert high - 0.1 * (high - low) < chosen.max() <= high
    assert RADIUS["small"][1] < RADIUS["large"][0]
    assert TRAVEL["slow"][1] < TRAVEL["fast"][0]


@pytest.mark.parametrize(("frames", "height", "width"), [(9, 32, 32), (13, 48, 40), (5, 24, 64)])
def test_object_stays_inside_the_frame(frames, height, width):
    mask = object_mask(sample_scenes(200, seeded()), frames, height, width)
    assert mask.shape == (200, frames, height, width)
    border = torch.cat([mask[:, :, [0, -1]].flatten(1), mask[..., [0, -1]].flatten(1)], dim=1)
    assert border.max() < 0.8  # part of the soft edge at most: the outline itself stays inside
    whole = mask.sum((2, 3))
    assert (whole.std(1) / whole.mean(1)).max() < 0.02


def test_render_mixes_exactly_two_colours():
    scenes = scene(colour="yellow", background="grey", shape="circle", size="large")
    clip = render(scenes, 9, 32, 32)
    front = torch.tensor(PALETTE["yellow"])
    back = torch.tensor(BACKGROUNDS["grey"])
    mask = object_mask(scenes, 9, 32, 32)[..., None]
    torch.testing.assert_close(clip, mask * front + (1 - mask) * back)
    assert clip.min() >= 0
    assert clip.max() <= 1
    assert mask.max() > 0.99
    assert mask.min() < 1e-4


@pytest.mark.parametrize(
    ("direction", "axis", "sign"), [("left", 0, -1), ("right", 0, 1), ("up", 1, -1), ("down", 1, 1)]
)
def test_motion_is_straight_even_and_as_long_as_travel(direction, axis, sign):
    scenes = scene(direction=direction, shape="circle")
    mask = object_mask(scenes, 9, 90, 120)[0]
    columns = (torch.arange(120) + 0.5) / 120
    rows = (torch.arange(90) + 0.5) / 90
    x = (mask.sum(1) * columns).sum(1) / mask.sum((1, 2))
    y = (mask.sum(2) * rows).sum(1) / mask.sum((1, 2))
    along, across = (x, y) if axis == 0 else (y, x)
    torch.testing.assert_close(
        along.diff(), torch.full((8,), sign * scenes.travel.item() / 8), atol=2e-4, rtol=0
    )
    torch.testing.assert_close(across, across[:1].expand(9), atol=1e-4, rtol=0)
    torch.testing.assert_close(
        torch.stack([x[4], y[4]]), torch.cat([scenes.x, scenes.y]), atol=1e-3, rtol=0
    )


def test_render_is_smooth_in_every_continuous_number():
    scenes = sample_scenes(64, seeded())
    scenes = with_parameters(scenes, parameters(scenes).double())
    for name in ("x", "y", "radius", "travel"):
        step = 1e-4

        def rendered(shift, name=name):
            moved = replace(scenes, **{name: getattr(scenes, name) + shift})
            return render(moved, 5, 32, 32)

        before, middle, after = rendered(-step), rendered(0), rendered(step)
        curvature = ((before + after - 2 * middle) / step**2).abs().max()
        assert (after - before).abs().max() > 0
        assert curvature < 2e4  # a kink of slope 32 would show as 32 / step = 3e5


@pytest.mark.parametrize("frames", [0, 1, 4, 8, 10])
def test_frames_must_be_4n_plus_1(frames):
    with pytest.raises(ValueError, match=f"frames is {frames}.*4n\\+1"):
        render(sample_scenes(1, seeded()), frames, 32, 32)


def test_too_small_frames_are_refused():
    with pytest.raises(ValueError, match="4x32"):
        render(sample_scenes(1, seeded()), 5, 4, 32)


def test_indexing_scenes():
    scenes = sample_scenes(6, seeded())
    assert len(scenes) == 6
    assert len(scenes[1:4]) == 3
    torch.testing.assert_close(scenes[torch.tensor([4, 0])].x, scenes.x[[4, 0]])


@given(seed=st.integers(0, 2**31))
def test_full_captions_name_every_attribute(seed):
    scenes = sample_scenes(1, seeded(seed))
    assert parse(captions(scenes)[0]) == {name: getattr(scenes, name).item() for name in ATTRIBUTES}


def test_caption_wording():
    scenes = scene(
        size="small", colour="red", shape="T", direction="left", speed="slow", background="black"
    )
    assert captions(scenes) == ['a small red letter "T" moving left slowly on a black background']


def test_partial_captions_are_true_and_sometimes_shorter():
    scenes = sample_scenes(300, seeded())
    texts = captions(scenes, seeded(1))
    assert texts == captions(scenes, seeded(1))
    parsed = [parse(text) for text in texts]
    for i, words in enumerate(parsed):
        assert {"colour", "shape", "direction"} <= set(words)
        assert all(getattr(scenes, name)[i] == index for name, index in words.items())
    for name in ("size", "speed", "background"):
        assert 0.6 < sum(name in words for words in parsed) / 300 < 0.8


def test_scenes_from_prompt_agree_with_the_prompt_and_vary_elsewhere():
    prompts = ["a red circle"] * 100 + ['a "H" moving up on a gray background'] * 100
    scenes = scenes_from_prompt(prompts, seeded())
    assert (scenes.colour[:100] == 0).all()
    assert (scenes.shape[:100] == 0).all()
    assert (scenes.shape[100:] == ATTRIBUTES["shape"].index("H")).all()
    assert (scenes.background[100:] == ATTRIBUTES["background"].index("grey")).all()
    assert len(scenes.direction[:100].unique()) == 4
    assert len(scenes.colour[100:].unique()) == 6
    assert len(render(scenes, 5, 16, 16)) == 200


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("", {}),
        (
            "A Large BLUE square, moving quickly to the right.",
            {"size": 1, "colour": 2, "shape": 1, "speed": 1, "direction": 1},
        ),
        ("the letter “x” on a white background", {"shape": 5, "background": 2}),
        ("a red red circle", {"colour": 0, "shape": 0}),
    ],
)
def test_parse_reads_free_wording(prompt, named):
    assert parse(prompt) == named


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a purple circle", "unknown word 'purple'.*red, green, blue"),
        ('a red letter "Q"', "unknown word '\"Q\"'.*L, T, X, H"),
        ("a red letter T moving left", "unknown word 'letter'.*double quotes"),
        ("a red circle on a red background", "unknown word 'red'.*background: black, grey, white"),
        ("a black circle", "unknown word 'black'"),
        ("a circle on a background", "unknown word 'a'"),
        ("a red blue circle", "names two colours, red and blue"),
    ],
)
def test_parse_refuses_what_it_does_not_know(prompt, message):
    with pytest.raises(ValueError, match=message):
        parse(prompt)
