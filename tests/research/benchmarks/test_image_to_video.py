"""The benchmark of image to video and 720p at CPU size: all parts leave their numbers, and ours agrees with stock."""

import re
from dataclasses import replace

import pytest
import torch

from research.benchmarks import image_to_video as script

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler, about itself


@pytest.mark.slow
def test_all_parts_are_measured_and_ours_agrees_with_stock(tmp_path, monkeypatch):
    """Slow: the whole program; its parts are tested with the model and the planner."""
    # compiled blocks are tested with the models; tracing them takes most of the time
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    page = tmp_path / "page.md"
    with pytest.raises(SystemExit) as end:
        script.main(["--rehearse", "--output", str(page), "--scratch", str(tmp_path / "scratch")])
    text = page.read_text()
    assert not end.value.code, text
    rows = {
        "forward, stock": 2,
        "LoRA step, stock, checkpointed": 2,
        "forward, ours, compiled": 3,
        script.STEP: 3,
    }
    assert all(text.count(f"| {name} |") == count for name, count in rows.items())
    apart = [float(number) for number in re.findall(r"velocity (\S+) apart", text)]
    assert len(apart) == 5 and max(apart) < 1e-5
    assert re.findall(r"rollout to training (\S+)", text) == ["0"] * 3
    assert "736 tokens beside it" in text and "7 tokens beside it" in text


def test_the_planner_counts_the_image():
    clip = script.PARTS["480p_i2v"].clip
    step, forward = (script.expected("480p_i2v", clip, moment) for moment in ("update", "rollout"))
    assert step > forward > 15.5  # the weights in bf16
    as_text = script.expected("480p_t2v", replace(clip, text=150 + 729), "update")
    assert (
        step == pytest.approx(as_text) and step > script.expected("480p_t2v", clip, "update") + 0.1
    )
