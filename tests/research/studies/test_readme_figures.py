"""The figures of the README: drawn from a run and from the recorded head-to-head."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from research.studies import readme_figures
from research.studies.compute import with_half
from research.studies.third_tables import end_spread, mean_of, told_ratio
from tests.tools.fake_run import make_run

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of imageio


@pytest.fixture(scope="module")
def arms():
    return readme_figures.head_to_head()


def clip(match, distance):
    return {"gold": {"match": match, "prompt_distance": distance}}


@pytest.mark.slow
def test_the_figures_are_drawn_from_the_first_and_the_last_validation(tmp_path, arms, monkeypatch):
    """Slow: all figures at full size; which clips are shown, the mosaic and the curves are tested alone."""
    folder = make_run(tmp_path / "run", iterations=2, every=2, prompts=17)
    monkeypatch.setattr(readme_figures, "head_to_head", lambda: arms)
    shown = readme_figures.validation_pairs(folder)[:2]
    monkeypatch.setattr(readme_figures, "most_improved", lambda pairs: shown)
    readme_figures.main([str(folder), "--output", str(tmp_path)])
    assert {path.name for path in tmp_path.glob("*.*")} == {
        "headline.png",
        "before_after.gif",
        "all_clips.png",
        "match_against_compute.png",
        "trained_clips.png",
    }
    side = (256 + 4) // 2  # a clip is enlarged in its file, and has a border
    with Image.open(tmp_path / "before_after.gif") as motion:
        assert motion.n_frames == 9 and motion.size == (2 * side, 2 * side)


def test_shown_are_clips_that_match_only_after_training_the_largest_gain_first():
    distances = (0.10, 0.11, 0.12, 0.13, 0.14, 0.15, 0.16)
    learned = [(clip(0, distance), clip(1, 0.05)) for distance in distances]
    others = [(clip(1, 0.9), clip(1, 0.0)), (clip(0, 0.9), clip(0, 0.0))]
    shown = readme_figures.most_improved([*others, *learned])
    assert shown == list(reversed(learned))[: readme_figures.SHOWN]


@pytest.mark.slow
def test_all_clips_are_in_the_mosaic(tmp_path):
    """Slow: renders README's video."""
    folder = make_run(tmp_path / "run", iterations=2, every=2, prompts=9)
    clips = [before for before, _ in readme_figures.validation_pairs(folder)]
    assert readme_figures.mosaic(clips).shape == (2 * (256 + 40), 8 * (256 + 40), 3)


def test_the_curves_end_at_the_matches_of_the_results_page(arms):
    """research/studies/results.md: nft 0.93, awm 0.92, published 0.43, with intervals over 8 seeds."""
    ends = {arm: readme_figures.match_curve(arms[arm])[1][-1] for arm in readme_figures.NAMED}
    assert ends["nft"] == pytest.approx(0.932, abs=5e-4)
    assert ends["awm"] == pytest.approx(0.922, abs=5e-4)
    assert ends["published"] == pytest.approx(0.428, abs=5e-4)
    assert all(len(arms[arm]) == 8 for arm in readme_figures.NAMED)
    ax = Figure().subplots()
    readme_figures.draw_compute(ax, arms, readme_figures.NAMED)
    assert len(ax.lines) == len(arms)
    assert {text.get_text() for text in ax.texts} >= {"DiffusionNFT (nft): 93%", "base model: 34%"}


def test_the_table_of_trained_clips_is_that_of_the_records():
    """Gold match after an eighth, a quarter and half of the compute and at the end, compute to 0.9, variety."""
    arms = readme_figures.trained_clips()
    page = (Path(__file__).parents[3] / "docs" / "results.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith(("| all of 8 |", "| best and worst of", "| 4 of 8 |"))
    ]
    assert len(rows) == 4
    base = arms["nft, all of 8"]
    for share, _, *told, ratio, variety in rows:
        runs = arms[f"nft, {share}"]
        spent, means, halves = readme_figures.match_curve(runs)
        parts = spent[-1] * np.array([1 / 8, 1 / 4, 1 / 2])
        matches = [f"{match:.2f}" for match in np.interp(parts, spent, means)]
        assert told == [*matches, f"{means[8]:.2f} ± {halves[8]:.2f}"], share
        assert ratio.split(",")[0] == ("1" if runs is base else told_ratio(runs, base))
        assert variety == with_half(mean_of(runs, end_spread), 2)


def test_a_run_without_a_validation_at_the_start_is_refused(tmp_path):
    folder = make_run(tmp_path / "run", iterations=1, every=50, prompts=2)
    with pytest.raises(SystemExit, match="two are needed: validate_at_step0 True"):
        readme_figures.main([str(folder), "--output", str(tmp_path)])
