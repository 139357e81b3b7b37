"""A reward that is pure chance has no signal: the interval of `signal/gradient` contains 0."""

import math

import pytest

from research.benchmarks.chance_signal import main, measure
from tests.smallest_run import slow


@pytest.mark.parametrize(
    ("algorithm", "prompts", "accumulation"),
    [
        ("nft", 2, 1),
        slow("nft", 1, 1),
        slow("grpo", 1, 2),
        slow("grpo", 2, 1),
        slow("awm", 1, 1),
        slow("awm", 2, 2),
    ],
)
def test_chance_has_no_signal(tmp_path, algorithm, prompts, accumulation):
    """Slow: the other algorithms, updates of one group of clips, and those of two iterations."""
    if algorithm != "grpo" and prompts == accumulation == 1:
        share, _ = measure(tmp_path, algorithm, prompts, accumulation, iterations=8)
        assert math.isnan(share)  # a single group has no independent halves
        return
    share, error = measure(tmp_path, algorithm, prompts, accumulation, iterations=60 * accumulation)
    assert error < 0.25
    assert abs(share) < 3 * error


def test_the_table(capsys):
    main(["--iterations", "16", "--algorithms", "awm"])
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + 4 and rows[2].startswith("| awm | 2 x 8 | 1 | ")
