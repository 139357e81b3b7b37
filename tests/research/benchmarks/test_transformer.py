"""The transformer benchmark at CPU size: every row is present, and all kernels compute the same."""

import os
import re
import signal

import pytest
import torch

from research.benchmarks import transformer as script

SMALL = "--repeat 1 --layers 1 --width 8 --clip 5 32 48 7 --long 5 48 48 7 --steps 4"
ROWS = (
    "forward, stock",
    "forward, packed and compiled",
    "forward, compiled, 8 bits",
    "4 steps with guidance, compiled",
    "LoRA, stock, checkpointed",
    "LoRA, attention kept, compiled",
    "all weights, stock, checkpointed",
    "all weights, attention kept, compiled",
)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler, about itself


@pytest.mark.slow
def test_every_row_is_measured_and_all_agree(tmp_path, monkeypatch):
    """Slow: all rows; single ones are measured below. Those called compiled are not compiled here."""
    # compiled blocks are compared with others in the models' tests; tracing them takes most of the time
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    monkeypatch.setattr(script, "PADDING", {"text": 12, "glyph": 3, "image": 2})
    script.main([*SMALL.split(), "--output", str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text()
    assert all(f"| {name} |" in text for name in ROWS)
    apart = [float(number) for number in re.findall(r"velocity (\S+) apart", text)]
    *exact, in_8_bits = apart
    assert len(exact) == 2 and max(exact) < 1e-5 < in_8_bits < 0.2
    assert re.findall(r"rollout to training (\S+)", text) == ["0"] * 5


def test_rows_are_chosen_by_name_and_those_measured_are_kept(tmp_path, monkeypatch):

    def stopped_later(bench, *_):
        for name in ("forward, stock", "forward, packed", "LoRA, attention kept"):
            bench.run(name, lambda: None, 1.0)
        yield "a fact"
        os.kill(os.getpid(), signal.SIGTERM)
        yield "too late"

    monkeypatch.setattr(script, "cases", stopped_later)
    with pytest.raises(SystemExit, match="stopped by a signal"):
        script.main(["--only", "packed|kept", "--output", str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text()
    assert re.findall(r"^\| (\w.*?) \|", text, re.MULTILINE) == [
        "forward, packed",
        "LoRA, attention kept",
    ]
    assert "- a fact" in text and "too late" not in text
