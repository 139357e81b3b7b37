"""Columns, paired differences, verdicts and tables of systems, against hand-computed numbers."""

import itertools
import math
import re
from pathlib import Path

import pytest

from sage_grpo.intervals import MIN_PAIRS, Interval
from sage_grpo.runs.clips import Clip
from sage_grpo.tools.paired import (
    MAX_PROMPTS,
    aligned,
    clip_rows,
    columns,
    compared,
    tables,
    verdict,
)


def clip(
    seed: int = 1, prompt: str = "a", path: Path = Path("none.mp4"), **values: float | None
) -> Clip:
    """`gold__distance` stands for gold/distance, and `videoalign_dot_VQ` for the score VQ of that reward."""
    named = {name.replace("__", "/").replace("_dot_", "."): value for name, value in values.items()}
    named = {name: math.nan if value is None else value for name, value in named.items()}
    return Clip(
        path,
        prompt,
        seed,
        {name if "/" in name else f"reward/{name}": v for name, v in named.items()},
    )


def test_the_columns_of_the_papers_table_come_first():
    scored = clip(ocr_dot_ocr=0.5, pickscore_dot_pickscore=0.74, clipscore_dot_cosine=0.2, videoalign_dot_VQ=-0.75,
                  videoalign_dot_MQ=-0.5, videoalign_dot_TA=1.5, total=9.0)  # fmt: skip
    found = columns(scored)
    assert list(found) == ["Overall", "VQ", "MQ", "TA", "CLIPScore", "PickScore", "ocr"]
    assert found["Overall"] == 0.25
    assert found["CLIPScore"] == pytest.approx(0.5)
    assert found["PickScore"] == 0.74
    assert columns(clip(cosine=-0.2)) == {"CLIPScore": 0}
    assert columns(clip(VQ=1.0, TA=2.0)) == {
        "VQ": 1,
        "TA": 2,
    }


def test_the_weighted_total_is_another_column_than_overall():
    found = columns(clip(VQ=1.0, MQ=2.0, TA=4.0, total=5.5), total=True)
    assert list(found.items()) == [
        ("total reward", 5.5),
        ("Overall", 7),
        ("VQ", 1),
        ("MQ", 2),
        ("TA", 4),
    ]


def test_two_rewards_with_one_name_stay_apart():
    assert columns(clip(videoalign_dot_VQ=1.0, shapes_dot_VQ=2.0)) == {"VQ": 1, "shapes.VQ": 2}


@pytest.mark.parametrize(
    ("mean", "half", "better", "said"),
    [
        (0.2, 0.1, 1, "better"),
        (-0.2, 0.1, 1, "worse"),
        (-0.2, 0.1, -1, "better"),
        (0.2, 0.1, -1, "worse"),
        (0.1, 0.2, 1, "not significant"),
        (1, math.nan, 1, "not significant"),
    ],
)
def test_verdict(mean, half, better, said):
    assert verdict(Interval(mean, half, MIN_PAIRS), better) == said
    assert verdict(Interval(mean, half, MIN_PAIRS - 1), better) == "too few clips"


def systems(
    *values: list[float | None], distances: tuple[list[float], ...] = ()
) -> dict[str, list[Clip]]:
    """Systems `one`, `two` ... with a clip per value."""
    found = {}
    for i, (name, own) in enumerate(zip(("one", "two", "three"), values, strict=False)):
        far = [{"gold__distance": d} for d in distances[i]] if distances else [{}] * len(own)
        found[name] = [clip(seed, total=value, **far[seed]) for seed, value in enumerate(own)]
    return found


def test_differences_are_paired_and_smaller_distances_win():
    clips = systems(
        [1.0, 2.0, 3.0, None], [2.0, 3.0, 3.0, 9.0], distances=([0.4] * 4, [0.1, 0.2, 0.1, 0.5])
    )
    found = compared(clips, total=True)
    total, distance = found["systems"]["two"]["columns"].values()
    assert total["count"] == 4
    assert total["pairs"] == 3
    assert found["systems"]["one"]["columns"]["total reward"]["count"] == 3
    assert total["difference"] == pytest.approx(2 / 3)
    assert total["win_rate"] == pytest.approx(2.5 / 3)
    assert total["difference_half"] == pytest.approx(
        4.303 * math.sqrt(1 / 3) / math.sqrt(3), rel=0.01
    )
    assert distance["difference"] == pytest.approx(-0.175) and distance["win_rate"] == 0.75
    assert total["verdict"] == distance["verdict"] == "too few clips"
    assert "difference" not in found["systems"]["one"]["columns"]["total reward"]


def test_clips_of_other_prompts_or_seeds_are_no_pairs():
    one = [clip(1, total=0.0), clip(2, total=0.0)]
    two = [clip(2, total=1.0), clip(1, "b", total=5.0)]
    result = compared({"one": one, "two": two}, total=True)
    total = result["systems"]["two"]["columns"]["total reward"]
    assert total["pairs"] == 1 and total["difference"] == 1 and total["mean"] == 3


def test_two_systems_make_one_table():
    totals = [1.5 + 0.1 * float(seed) for seed in range(9)]
    distances = [0.05 + 0.001 * (seed % 2) for seed in range(9)]
    clips = systems([1.0] * 9, totals, distances=([0.05] * 9, distances))
    (table,) = tables(compared(clips, total=True))
    titles, total, distance = aligned(table.rows).splitlines()
    assert re.split("  +", titles) == [
        "mean ± 95 %",
        "one, 9 clips",
        "two, 9 clips",
        "two minus one",
    ]
    # Student's t of 8 degrees of freedom; the values' variance is 0.075
    half = 2.306 * math.sqrt(0.075) / 3
    change = f"+0.900 ± {half:.3f}, wins 100% of 9, better"
    assert re.split("  +", total) == [
        "total reward",
        "1.000 ± 0.000",
        f"1.900 ± {half:.3f}",
        change,
    ]
    assert distance.startswith("gold distance (lower is better)  0.0500 ± 0.0000")
    assert distance.endswith(", worse")


def test_more_systems_have_differences_in_a_table_of_their_own():
    clips = systems([1.0] * 9, [1.0, 2.0] * 4 + [0.5], [None] * 8 + [3.0])
    means, against = [table.rows for table in tables(compared(clips, total=True))]
    assert means[0][1:] == ["one, 9 clips", "two, 9 clips", "three, 9 clips"] and len(means[1]) == 4
    assert against[0] == ["difference ± 95 %", "two minus one", "three minus one"]
    assert against[1][1].endswith("wins 67% of 9, not significant")
    assert against[1][2] == "+2.000 ± –, wins 100% of 1, too few clips"
    (alone,) = tables(compared(systems([1.0, 2.0, 3.0]), total=True))
    assert alone.rows == [["mean ± 95 %", "one, 3 clips"], ["total reward", "2.000 ± 2.484"]]


def test_captions_explain_what_a_table_has():
    scores = {"VQ": 1.0, "MQ": 1.0, "TA": 1.0}
    (alone,) = tables(compared({"one": [clip(**scores)]}), note="A note.")
    assert "A note. Overall is VQ" in alone.caption
    assert "total reward" not in alone.caption and "Differences" not in alone.caption
    (both,) = tables(compared(systems([1.0], [2.0]), total=True))
    assert "The total reward is" in both.caption and "Differences are taken" in both.caption
    means, differences = tables(compared(systems([1.0], [2.0], [3.0]), total=True))
    assert "Differences" not in means.caption and "Differences are taken" in differences.caption


def test_shown_clips_spread_over_gains_and_losses(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(bytes(10))
    before = [clip(i, str(i), path, total=0.0) for i in range(30)]
    after = [clip(i, str(i), path, total=float(i)) for i in range(30)]
    # a second clip of a prompt, and one without its file
    before += [clip(50, "8", path, total=0.0), clip(60, "60", total=0.0)]
    after += [clip(50, "8", path, total=50.0), clip(60, "60", total=60.0)]
    shown = clip_rows({"a": before, "b": after}, total=True)
    gains = [row[1].clip.reward for row in shown]
    assert len(gains) == MAX_PROMPTS
    assert gains[0] == 29
    assert gains[-1] == 0
    assert gains == sorted(gains, reverse=True)
    assert max(a - b for a, b in itertools.pairwise(gains)) <= 3
    assert [[cell.system for cell in row] for row in shown] == [["a", "b"]] * MAX_PROMPTS


def test_rows_that_lack_a_clip_are_shown_if_all_do(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(bytes(10))
    one = clip(1, "a", path, VQ=1.0)
    two = clip(1, "a", path, VQ=2.0)
    other = clip(2, "b", path, VQ=3.0)
    assert [len(row) for row in clip_rows({"a": [one], "b": [two, other]})] == [2]
    assert [len(row) for row in clip_rows({"a": [one], "b": [other]})] == [1, 1]
    assert clip_rows({}) == []
