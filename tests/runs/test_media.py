import os
import sys
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from imageio_ffmpeg import get_ffmpeg_exe
from PIL import Image, ImageFont

from sage_grpo.runs.media import (
    GAP,
    LABEL_HEIGHT,
    MARGIN,
    MAX_SIDE,
    contact_sheet,
    fitted,
    read_mp4,
    reduced,
    thumbnails,
    write_mp4,
)
from sage_grpo.worlds.shapes.scenes import render, sample_scenes
from tests.disks import fill, small_disk

# imageio's reader leaves the pipes of its ffmpeg process to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


def clips(count: int = 2) -> torch.Tensor:
    return (
        (render(sample_scenes(count, torch.Generator().manual_seed(0)), 9, 32, 32) * 255)
        .round()
        .to(torch.uint8)
    )


def test_mp4_plays_back_as_it_was(tmp_path):
    (clip,) = clips(1)
    write_mp4(tmp_path / "a.mp4", clip, fps=8)
    with imageio.get_reader(tmp_path / "a.mp4") as reader:
        assert reader.get_meta_data()["fps"] == 8
        frames = np.stack(list(reader.iter_data()))
    assert frames.shape == (9, 256, 256, 3)  # tiny clips are magnified eightfold
    error = np.abs(frames[:, 4::8, 4::8].astype(int) - clip.numpy().astype(int))
    assert error.mean() < 4


def test_a_magnified_clip_is_reduced_to_its_own_size(tmp_path):
    (clip,) = clips(1)
    write_mp4(tmp_path / "a.mp4", clip[:, :24], fps=8)
    video, _ = read_mp4(tmp_path / "a.mp4")
    small = reduced(video, 24, 32)
    assert small.shape == (9, 24, 32, 3) and small.dtype == torch.uint8
    assert (small.int() - clip[:, :24].int()).abs().float().mean() < 4
    for height, width in ((0, 0), (23, 32), (24, 31), (-24, -32)):
        assert reduced(video, height, width) is video


def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path):
    (clip,) = clips(1)
    disk = tmp_path / "disk"
    with small_disk(disk, megabytes=1):
        fill(disk / "rest", leave=1000)
        with pytest.raises(OSError, match=r"a\.mp4 could not be written.*No space left"):
            write_mp4(disk / "a.mp4", clip, fps=8)
        with pytest.raises(OSError, match="No space left"):
            contact_sheet(disk / "a.png", [thumbnails(clip)], ["a clip"])
        assert [path.name for path in disk.iterdir()] == ["rest"]


def test_a_video_is_not_written_through_a_link(tmp_path):
    """A run folder may come from somebody else."""
    (tmp_path / "user's").write_text("kept")
    (tmp_path / "a.mp4").symlink_to(tmp_path / "user's")
    write_mp4(tmp_path / "a.mp4", clips(1)[0], fps=8)
    assert (tmp_path / "user's").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mp4", "user's"]
    assert not (tmp_path / "a.mp4").is_symlink()


def test_a_video_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    (clip,) = clips(1)
    write_mp4(tmp_path / "a.mp4", clip, fps=8)
    complete = (tmp_path / "a.mp4").read_bytes()
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "false")
    with pytest.raises(OSError, match=r"a\.mp4 could not be written by ffmpeg: exit code 1"):
        write_mp4(tmp_path / "a.mp4", clip, fps=8)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [complete]


@pytest.mark.parametrize(
    "wrong", [torch.zeros(4, 32, 32, 3), clips(1)[0][..., :1], clips(1)[0][:0]]
)
def test_what_is_no_clip_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="a clip is uint8"):
        write_mp4(tmp_path / "a.mp4", wrong, fps=8)


def test_larger_clips_keep_their_size(tmp_path):
    write_mp4(tmp_path / "a.mp4", torch.zeros(5, 128, 160, 3, dtype=torch.uint8), fps=24)
    with imageio.get_reader(tmp_path / "a.mp4") as reader:
        assert reader.get_data(0).shape == (128, 160, 3)


def test_contact_sheet_shows_frames_in_order(tmp_path):
    batch = clips(2)
    contact_sheet(
        tmp_path / "sheet.png", [thumbnails(clip, columns=3) for clip in batch], ["first", "second"]
    )
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert sheet.shape == (
        2 * (96 + LABEL_HEIGHT + MARGIN) + MARGIN,
        3 * (96 + GAP) - GAP + 2 * MARGIN,
        3,
    )
    assert (sheet[:MARGIN] == 255).all()
    assert (sheet[:, :MARGIN] == 255).all()
    assert (sheet[:, -MARGIN:] == 255).all()
    assert (sheet[MARGIN : MARGIN + LABEL_HEIGHT] < 100).any(), "the label"
    top = MARGIN + LABEL_HEIGHT
    for column, frame in enumerate((0, 4, 8)):
        left = MARGIN + column * (96 + GAP)
        shown = sheet[top : top + 96, left : left + 96][1::3, 1::3]
        assert np.array_equal(shown, batch[0, frame].numpy())


def test_large_clips_are_shrunk_and_short_ones_shown_whole():
    assert thumbnails(torch.zeros(9, 480, 960, 3, dtype=torch.uint8)).shape == (
        5,
        MAX_SIDE // 2,
        MAX_SIDE,
        3,
    )
    assert len(thumbnails(torch.zeros(1, 32, 32, 3, dtype=torch.uint8))) == 1


def test_labels_are_one_printable_line_that_fits():
    font = ImageFont.load_default(13)
    assert fitted("caf\u00e9\nand \u202etea", font, 600) == "caf\u00e9 and tea"
    cut = fitted("x" * 200, font, 120)
    assert cut == "x" * (len(cut) - 1) + "…"
    assert font.getlength(cut) <= 120 < font.getlength("x" + cut)
    assert fitted("anything", font, 0) == "…"


def test_ctrl_c_does_not_reach_the_encoder(tmp_path, monkeypatch):
    """A terminal signals the whole process group; the run itself stops in an orderly way."""
    encoder = tmp_path / "ffmpeg"
    group = tmp_path / "group"
    encoder.write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, sys\n"
        f"pathlib.Path({str(group)!r}).write_text(str(os.getpgrp()))\n"
        f"os.execv({get_ffmpeg_exe()!r}, sys.argv)\n"
    )
    encoder.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(encoder))
    write_mp4(tmp_path / "a.mp4", clips(1)[0], fps=8)
    assert int(group.read_text()) != os.getpgrp()


def test_odd_sides_become_even(tmp_path):
    write_mp4(tmp_path / "a.mp4", torch.zeros(2, 129, 131, 3, dtype=torch.uint8), fps=8)
    assert read_mp4(tmp_path / "a.mp4")[0].shape == (2, 130, 132, 3)


def test_a_name_with_a_colon_is_a_file_and_not_a_protocol(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_mp4(Path("a:b.mp4"), clips(1)[0], fps=8)
    assert (tmp_path / "a:b.mp4").stat().st_size


def test_the_encoder_says_why(tmp_path):
    with pytest.raises(
        OSError, match=r"nowhere/a\.mp4 could not be written by ffmpeg: .*No such file"
    ):
        write_mp4(tmp_path / "nowhere" / "a.mp4", clips(1)[0], fps=8)
