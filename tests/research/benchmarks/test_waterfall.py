"""The table and figure of docs/scaling.md are what the planner says."""

import pytest

from research.benchmarks import waterfall


def test_the_page_shows_what_the_planner_says():
    assert (
        waterfall.table(waterfall.plans()) in (waterfall.ROOT / "docs" / "scaling.md").read_text()
    )


def test_every_change_saves_time_and_the_figure_shows_it(tmp_path):
    found = waterfall.plans()
    whole = [sum(waterfall.seconds(plan).values()) for plan in found.values()]
    assert whole == sorted(whole, reverse=True) and whole[0] > 5 * whole[-2]
    bars = waterfall.draw(found).axes[0].patches
    assert sum(bar.get_width() for bar in bars) == pytest.approx(sum(whole))
    waterfall.main(["--output", str(tmp_path / "waterfall.png")])
    assert (tmp_path / "waterfall.png").stat().st_size > 5000
