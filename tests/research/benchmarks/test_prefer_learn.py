"""The benchmark of `prefer learn`, rehearsed with a tiny reward as if it were a large one."""

import pytest

from research.benchmarks import prefer_learn as script
from sage_grpo.tools.prefer import learn, lora


@pytest.mark.slow
def test_heads_and_adapter_are_measured_as_at_full_size(tmp_path, monkeypatch, capsys):
    """Slow: the whole command twice. One pair per backward, layers recomputed, a plan in gigabytes."""
    monkeypatch.setattr(learn, "LARGE", 0)
    monkeypatch.setattr(lora, "LARGE", 0)
    page = tmp_path / "page.md"
    script.main(["--rehearse", "--output", str(page)])
    rows = [line.split(" | ") for line in page.read_text().splitlines()[-2:]]
    assert [row[0] for row in rows] == ["| heads", "| lora"]
    assert all(" GB, at most about " in row[1] for row in rows)
    assert all(float(row[2]) > 0 for row in rows)
