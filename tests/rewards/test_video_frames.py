"""Frames, sizes and patches against the published code, and edge cases of the rules."""

import pytest
import torch

from sage_grpo.rewards import video_frames as vf

CLIP = torch.zeros(8, 28, 28, 3, dtype=torch.uint8)


def test_frames_and_sizes_are_those_of_the_published_code(samples):
    for sample in samples:
        indices = vf.sample_indices(sample.num_frames, sample.fps, 2.0)
        assert indices.tolist() == sample.sampled_frames, sample.name
        size = vf.frame_size(sample.height, sample.width, 200704)
        assert size == (sample.resized_height, sample.resized_width), sample.name


def test_patches_are_those_of_the_published_code(samples, upstream):
    rows = []
    grids = []
    for sample in samples:
        frames = sample.clip[sample.sampled_frames]
        pixels = vf.resize(frames, (sample.resized_height, sample.resized_width))
        assert torch.equal(pixels, pixels.round())
        assert pixels.min() >= 0
        assert pixels.max() <= 255
        sample_rows, grid = vf.patches(vf.normalize(pixels))
        rows.append(sample_rows)
        grids.append(grid)
    rows = torch.cat(rows)
    assert torch.equal(torch.tensor(grids), upstream["video_grid_thw"])
    torch.testing.assert_close(
        rows[upstream["pixel_rows_index"]], upstream["pixel_rows"], atol=1e-5, rtol=0
    )
    ramp = torch.linspace(-1, 1, rows.shape[1], dtype=torch.float64)
    torch.testing.assert_close(rows.double().sum(1), upstream["pixel_row_sum"], atol=1e-2, rtol=0)
    torch.testing.assert_close(rows.double() @ ramp, upstream["pixel_row_ramp"], atol=1e-2, rtol=0)


@pytest.mark.parametrize(
    "frames, fps, sample_fps, expected",
    [
        (81, 24, 2, 6),  # 6.75: nearer to 6 than to 8
        (25, 10, 2, 4),  # 5.0 lies half-way: to the even half
        (35, 10, 2, 8),  # 7.0 likewise: 3.5 pairs are 4
        (5, 8, 2, 4),  # at least 4
        (3, 8, 2, 2),  # as many as there are, in pairs
        (7, 1, 2, 6),
        (2, 24, 2, 2),
    ],
)
def test_number_of_frames(frames, fps, sample_fps, expected):
    indices = vf.sample_indices(frames, fps, sample_fps)
    assert len(indices) == expected
    assert indices[0] == 0
    assert indices[-1] == frames - 1


def test_a_single_frame_is_a_clip_that_stands_still():
    assert vf.sample_indices(1, 8.0, 2.0).tolist() == [0, 0]
    assert vf.sample_indices(1, 8.0, 2.0, num_frames=8).tolist() == [0] * 8


def test_a_fixed_number_of_frames_is_taken_or_refused():
    assert vf.sample_indices(75, 30, 2.0, num_frames=8).tolist() == [0, 11, 21, 32, 42, 53, 63, 74]
    with pytest.raises(ValueError, match="8 frames cannot be sampled from a clip of 7"):
        vf.sample_indices(7, 30, 2.0, num_frames=8)


def test_sizes_stay_within_their_bounds_and_shape():
    for height, width in ((32, 32), (352, 624), (720, 1280), (600, 900), (1000, 30), (28, 5000)):
        h, w = vf.frame_size(height, width, 200704)
        assert h % 28 == w % 28 == 0
        assert vf.MIN_PIXELS <= h * w <= 200704 or min(h, w) == 28
    with pytest.raises(ValueError, match="28x6000; one side may be at most 200 times the other"):
        vf.frame_size(28, 6000, 200704)


@pytest.mark.parametrize(
    "clips, prompts, fps, words",
    [
        ([CLIP], ["a", "b"], 8.0, "1 clips, 2 prompts and 1 fps"),
        ([CLIP, CLIP], ["a", "b"], [8.0], "2 clips, 2 prompts and 1 fps"),
        ([], [], 8.0, "0 clips"),
        ([CLIP.float()], ["a"], 8.0, "torch.float32"),
        ([CLIP[0]], ["a"], 8.0, r"\(28, 28, 3\)"),
        ([CLIP], ["a"], 0.0, "fps is 0.0"),
        ([CLIP], ["a"], [float("nan")], "must be positive"),
    ],
)
def test_what_is_no_clip_is_refused(clips, prompts, fps, words):
    with pytest.raises(ValueError, match=words):
        vf.check_clips(clips, prompts, fps)
