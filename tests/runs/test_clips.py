"""The clips of a validation: written, read back, and paired with another validation's."""

import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from sage_grpo.files.json_files import write_json
from sage_grpo.runs.clips import (
    SHEET,
    SHEET_ROWS,
    Clip,
    pair_clips,
    read_clips,
    read_validations,
    sheet_label,
    write_sheet,
    write_videos,
)
from sage_grpo.runs.hacking import divergence
from sage_grpo.runs.history import RunError
from sage_grpo.runs.media import MARGIN


def clip(seed: int, prompt: str = "a", image: str = "") -> Clip:
    return Clip(Path("none.mp4"), prompt, seed, {}, image)


def entry(seed: int, total: float | None, distance: float) -> dict:
    gold = {"distance": distance}
    return {
        "file": f"{seed}.mp4",
        "prompt": "a",
        "seed": seed,
        "number": 0,
        "scores": {"total": total},
        "gold": gold,
    }


def test_clips_are_paired_by_prompt_and_seed_in_any_order():
    before = [clip(1), clip(2), clip(2, "b"), clip(3)]
    after = [clip(2, "b"), clip(2), clip(4), clip(1)]
    assert [(a.seed, a.prompt, b.seed, b.prompt) for a, b in pair_clips(before, after)] == [
        (1, "a", 1, "a"),
        (2, "a", 2, "a"),
        (2, "b", 2, "b"),
    ]


def test_clips_of_one_prompt_and_seed_are_paired_by_their_images():
    before = [clip(1, "a", "x.png"), clip(1, "a", "y.png")]
    after = [clip(1, "a", "y.png"), clip(1, "a", "z.png")]
    assert pair_clips(before, after) == [(before[1], after[0])]


def test_clips_have_all_that_was_measured(tmp_path):
    (tmp_path / "clips.json").write_text(
        json.dumps([entry(3, None, 0.2) | {"holdout": {"CLIP": 0.7}}])
    )
    (read,) = read_clips(tmp_path)
    assert (read.path, read.prompt, read.seed) == (tmp_path / "3.mp4", "a", 3)
    assert math.isnan(read.values.pop("reward/total"))
    assert read.values == {"holdout/CLIP": 0.7, "gold/distance": 0.2}


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "sub/clip.mp4", "a\0b", "x" * 300, "link.mp4"]
)
def test_a_list_of_clips_cannot_put_other_files_into_a_report(tmp_path, name):
    (tmp_path / "link.mp4").symlink_to("/etc/passwd")
    (tmp_path / "clips.json").write_text(json.dumps([entry(3, 1.0, 0.2) | {"file": name}]))
    with pytest.raises(
        RunError, match=r"clips\.json names the file .*, which does not lie beside it"
    ):
        read_clips(tmp_path)


GOOD = json.dumps([entry(3, 1.0, 0.2)])


@pytest.mark.parametrize(
    "text", ["", GOOD[:-5], "{}", "3", "[3]", "[null]", "[" * 99999, "[{}]", "\0"]
)
def test_a_damaged_list_of_clips_is_named(tmp_path, text, capsys):
    for step in (0, 1):
        folder = tmp_path / "validation" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "clips.json").write_text(text if step else GOOD)
    with pytest.raises(RunError, match=r"step-000001/clips\.json"):
        read_clips(folder)
    with pytest.raises(RunError, match=r"step-000001/clips\.json"):
        read_validations(tmp_path)
    assert divergence(tmp_path, 1) is None  # training goes on
    assert "note: not checked for reward hacking: " in capsys.readouterr().err


@pytest.mark.parametrize("change", [
    {"file": None}, {"file": 3}, {"prompt": None}, {"prompt": ["a"]}, {"seed": "3"}, {"seed": None}, {"scores": []},
    {"scores": {"total": "1"}}, {"scores": {"total": [1]}}, {"gold": 3}, {"holdout": {"x": {}}},
    {"gold": {"a\nb": "x"}},
    {"prompt": "half \ud800"}, {"file": "\ud800"}, {"scores": {"\ud800": 1}}, {"image": "\udcff"},
], ids=ascii)  # fmt: skip
def test_a_value_of_another_kind_is_named(tmp_path, change):
    (tmp_path / "clips.json").write_text(
        json.dumps([entry(3, 1.0, 0.2), entry(4, 1.0, 0.2) | change])
    )
    with pytest.raises(RunError, match=r"clips\.json, clip 2") as caught:
        read_clips(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_numbers_beyond_all_scales_are_missing(tmp_path):
    (tmp_path / "clips.json").write_text(
        json.dumps([entry(3, 1e308, 10**400) | {"holdout": {"x": float("inf")}}])
    )
    assert all(map(math.isnan, read_clips(tmp_path)[0].values.values()))


def test_folders_that_are_no_validations_are_left_out(tmp_path):
    for name in ("step-x", "step-", "step-1.5", "step-" + "9" * 40):
        (tmp_path / "validation" / name).mkdir(parents=True)
        (tmp_path / "validation" / name / "clips.json").write_text(GOOD)
    (tmp_path / "validation" / "step-000002" / "clips.json").mkdir(parents=True)
    assert read_validations(tmp_path) == {}


def test_the_sheet_names_reward_and_prompt():
    labels = [
        sheet_label({"scores": {"total": total}, "prompt": "a cat"}) for total in (0.63701756, None)
    ]
    assert labels == ["0.637  a cat", "failed  a cat"]


def test_only_clips_that_exist_and_are_kept_become_videos(tmp_path):
    pixels = torch.zeros(5, 16, 16, 3, dtype=torch.uint8)
    records = [entry(seed, 1.0, 0.1) for seed in (1, 2, 3)]
    write_videos(tmp_path / "step", [pixels, None, pixels], records, {"1.mp4", "2.mp4"}, 8)
    assert [file.name for file in (tmp_path / "step").iterdir()] == ["1.mp4"]


def test_the_sheet_shows_the_first_clips_and_none_where_all_are_lost(tmp_path):
    pixels = torch.zeros(5, 16, 16, 3, dtype=torch.uint8)
    records = [entry(seed, 1.0, 0.1) for seed in range(SHEET_ROWS + 2)]
    write_sheet(tmp_path, [None] * len(records), records)
    assert not (tmp_path / SHEET).exists()
    heights = []
    for clips in ([None, pixels], [pixels] * len(records)):
        write_sheet(tmp_path, clips, records[: len(clips)])
        with Image.open(tmp_path / SHEET) as sheet:
            heights.append(sheet.height)
    assert heights[1] - MARGIN == SHEET_ROWS * (heights[0] - MARGIN)


def test_every_validation_is_found_by_its_iteration(tmp_path):
    for step in (0, 100):
        folder = tmp_path / "validation" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        write_json(
            folder / "clips.json", [entry(step, 1.0, 0.1) | {"prompt": "é"}], ensure_ascii=False
        )
        assert [file.name for file in folder.iterdir()] == ["clips.json"]
    found = read_validations(tmp_path)
    assert list(found) == [0, 100] and [clips[0].seed for clips in found.values()] == [0, 100]
    assert read_clips(tmp_path / "validation" / "step-000100")[0].prompt == "é"
    assert read_clips(tmp_path) == [] and read_validations(tmp_path / "none") == {}
