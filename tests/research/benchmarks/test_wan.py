"""The Wan benchmark at CPU size: all parts leave their numbers, ours and stock agree, and the first ratio is 1."""

import re

import pytest
import torch

from research.benchmarks import parts
from research.benchmarks import wan as script
from sage_grpo.train import trainer as training

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler, about itself


@pytest.fixture(autouse=True)
def about_here(monkeypatch):
    """Versions are those of this process; test_image_to_video.py starts one to ask."""
    monkeypatch.setattr(script, "about", lambda: parts.versions() | {"command": "python"})


@pytest.mark.slow
@pytest.mark.parametrize("name, transformers", [("wan22-ti2v-5b", 2), ("wan22-t2v-a14b", 0)])
def test_all_parts_are_measured_and_ours_agrees_with_stock(
    tmp_path, monkeypatch, name, transformers
):
    """Slow: the whole program."""
    # compiled blocks are tested with the models; tracing them takes most of the time
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    monkeypatch.setattr(
        "research.benchmarks.grpo.training.Stopwatch", type("Watch", (training.Stopwatch,), {})
    )
    seen = []  # of the transformer: seconds by phase
    overhead = script.trainer_overhead
    monkeypatch.setattr(
        script,
        "trainer_overhead",
        lambda spent, inside: seen.append(inside) or overhead(spent, inside),
    )
    page = tmp_path / "page.md"
    with pytest.raises(SystemExit) as end:
        flags = ["--rehearse", "--model", name, "--scratch", str(tmp_path / "scratch")]
        script.main([*flags, "--output", str(page)])
    text = page.read_text()
    assert not end.value.code, text
    rows = (
        "forward, stock",
        "forward, ours, compiled",
        "LoRA step, stock, checkpointed",
        "LoRA step, ours, compiled",
    )
    assert all(text.count(f"| {row} |") == transformers for row in rows)
    apart = [float(number) for number in re.findall(r"velocity (\S+) apart", text)]
    assert all(seen[0][phase] > 0 for phase in ("rollout", "anchor", "update"))
    assert len(apart) == 2 * transformers and max(apart, default=0) < 1e-5
    assert re.findall(r"rollout to training (\S+)", text) == ["0"] * 2 * transformers
    assert "first ratio from 1: 0." in text and all(
        f"| {phase} |" in text for phase in script.PHASES
    )


def test_a_part_that_fails_leaves_the_other(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of cheese")

    monkeypatch.setattr(script, "iteration", fail)
    monkeypatch.setattr(script, "transformer_rows", lambda *_: {"rows": [], "facts": ["a fact"]})
    page = tmp_path / "page.md"
    with pytest.raises(SystemExit, match="failed: grpo"):
        script.main(["--rehearse", "--output", str(page), "--scratch", str(tmp_path / "scratch")])
    assert "- a fact" in page.read_text() and "out of cheese" in page.read_text()
