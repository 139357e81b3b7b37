"""Clips of known quality: how they are corrupted, and which orders count as correct."""

import pytest
import torch

from sage_grpo.intervals import Interval
from sage_grpo.tools.calibration import DEFECTS, DRAWN_DEFECTS, Order, orders, spoilt

CLIPS = [torch.arange(4, dtype=torch.uint8)[:, None, None, None].expand(4, 8, 8, 3) * 10 + 100 * i for i in range(2)]


def test_each_kind_has_its_defect_and_no_other():
    kinds = spoilt(CLIPS, ["a", "b"])
    assert list(kinds) == ["good", "frozen", "noisy", "reversed", "wrong prompt"]
    assert all(map(torch.equal, kinds["good"][0], CLIPS)) and kinds["wrong prompt"][1] == ["b", "a"]
    assert kinds["frozen"][0][1].unique().tolist() == [100]
    assert kinds["reversed"][0][0][:, 0, 0, 0].tolist() == [30, 20, 10, 0]
    spread = (kinds["noisy"][0][1].float() - CLIPS[1].float()).std() / 255
    assert 0.2 < spread < 0.31  # less than what was added, since pixels end at 0 and 255
    for name in ("frozen", "noisy", "reversed"):
        assert kinds[name][1] == ["a", "b"] and all(clip.dtype == torch.uint8 for clip in kinds[name][0])
    assert "wrong prompt" not in spoilt(CLIPS, ["a", "a"])
    assert spoilt(CLIPS * 2, ["a", "a", "b", "b"])["wrong prompt"][1] == ["b", "b", "a", "a"]


def test_the_score_that_is_about_a_defect_must_fall():
    good = {"total": torch.ones(8), "videoalign.VQ": torch.ones(8), "videoalign.TA": torch.ones(8)}
    found = {"good": good, "noisy": {n: v - 0.5 for n, v in good.items()}, "reversed": good}
    (noisy,) = orders(found, DEFECTS)
    assert (noisy.score, noisy.kind, noisy.mark) == ("videoalign.VQ", "noisy", "ok") and noisy.change == Interval(
        -0.5, 0
    )
    assert [(o.score, o.mark) for o in orders(found, DRAWN_DEFECTS)] == [
        ("videoalign.VQ", "ok"),
        ("videoalign.TA", "WRONG"),
    ]


@pytest.mark.parametrize(("mean", "half", "mark"), [(-1, 0.5, "ok"), (-1, 2, "weak"), (0, 0, "WRONG"), (1, 2, "WRONG")])
def test_marks(mean, half, mark):
    assert Order("VQ", "noisy", Interval(mean, half, 8)).mark == mark
    assert Order("VQ", "noisy", Interval(float("nan"), half, 8)).mark == "WRONG"
    few = Order("VQ", "noisy", Interval(mean, half, 7)).mark
    assert few == ("WRONG" if mark == "WRONG" else "too few clips")
