"""The figure of overoptimisation: what is on its axes, and where its lines stand."""

import numpy as np
import pytest

from sage_grpo.intervals import interval
from sage_grpo.runs.history import read_run
from sage_grpo.tools.paired import validation_clips
from studies import overoptimisation
from tests.tools.fake_run import make_run, read_lines, write_lines


@pytest.fixture
def beyond(tmp_path):
    """A run whose gold turns at iteration 100 of 200; the KL grows with the iteration."""
    folder = make_run(tmp_path / "beyond", iterations=200, every=50, prompts=2)
    lines = read_lines(folder)
    for line in lines:
        if line["kind"] == "train":
            line["kl/anchor"] = 1e-8 * line["step"] ** 2
        if line["kind"] == "validation":
            line["gold/match"] = 0.5 - abs(line["step"] - 100) / 1000
            line |= {"holdout/A": -((line["step"] - 50) ** 2) / 1e4, "holdout/B": 0.0}
    write_lines(folder, lines)
    return folder


def test_lines_stand_where_gold_and_the_held_out_reward_were_highest(beyond, tmp_path):
    run = read_run(beyond)
    x = overoptimisation.distances(run)
    assert x[0] == 0 and (np.diff(x) > 0).all() and x[2] == pytest.approx(1e-4 * 95, rel=0.05)
    reward = overoptimisation.draw(run, run).axes[0]
    places = [line.get_xdata()[0] for line in reward.get_lines() if line.get_linestyle() == "--"]
    assert places == [x[2], x[1], x[4]]
    overoptimisation.main([str(beyond), "--output", str(tmp_path / "figure.png")])
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_error_bars_are_half_of_a_95_percent_interval(tmp_path):
    run = read_run(make_run(tmp_path / "run", iterations=4, every=2, prompts=9))
    reward, gold = overoptimisation.draw(run).axes
    for ax, key in ((reward, overoptimisation.REWARD), (gold, overoptimisation.GOLD)):
        values = [[clip.values[key] for clip in clips] for clips in validation_clips(run).values()]
        (bars,) = (collection.get_segments() for collection in ax.collections)
        halves = [(high - low) / 2 for (_, low), (_, high) in bars]
        assert halves == pytest.approx([interval(found).half for found in values])


def test_a_run_without_a_curve_is_refused(tmp_path):
    folder = make_run(tmp_path / "short", iterations=2, every=2, prompts=2)
    with pytest.raises(SystemExit, match=r"has 2 validation\(s\); at least 3 make a curve"):
        overoptimisation.main([str(folder)])
