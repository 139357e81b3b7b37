"""The benchmark of the transformer at a size where a CPU is enough: every row is there, and all compute the same."""

import functools
import re

import pytest
import torch

from tests.scripts.load import load_script

SMALL = "--repeat 1 --layers 1 --width 8 --clip 5 32 48 7 --long 5 48 48 7 --steps 4"
ROWS = (
    "forward, stock",
    "forward, packed and compiled",
    "4 steps with guidance, compiled",
    "LoRA, stock, checkpointed",
    "LoRA, attention kept, compiled",
    "all weights, stock, checkpointed",
    "all weights, attention kept, compiled",
)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler, about itself


def test_every_row_is_measured_and_all_agree(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # no C++ needed
    script = load_script("bench_transformer")
    monkeypatch.setattr(script, "PADDING", {"text": 12, "glyph": 3, "image": 2})
    script.main([*SMALL.split(), "--output", str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text()
    assert all(f"| {name} |" in text for name in ROWS)
    apart = [float(number) for number in re.findall(r"velocity (\S+) apart", text)]
    assert len(apart) == 2 and max(apart) < 1e-5
    assert re.findall(r"rollout to training (\S+)", text) == ["0"] * 5
