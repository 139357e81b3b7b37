"""The figures of the README: drawn from a run, with clips chosen by their gain in reward."""

import pytest
from PIL import Image

from research.studies import readme_figures
from sage_grpo.intervals import interval
from sage_grpo.runs.history import read_run
from sage_grpo.tools.paired import validation_clips
from tests.tools.fake_run import make_run

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of imageio


def test_the_figures_are_drawn_from_the_first_and_the_last_validation(tmp_path):
    folder = make_run(tmp_path / "run", iterations=2, every=2, prompts=17)
    readme_figures.main([str(folder), "--output", str(tmp_path)])
    assert {path.name for path in tmp_path.glob("*.*")} == {
        "before_after.png",
        "before_after.gif",
        "demo_curves.png",
    }
    side = (256 + 4) // 2  # a clip is enlarged in its file, and has a border
    with Image.open(tmp_path / "before_after.gif") as motion:
        assert motion.n_frames == 9 and motion.size == (4 * side, 2 * side)


def test_clips_are_chosen_at_quantiles_of_the_gain():
    sides = [[{"scores": {"total": -gain * after}} for gain in range(16)] for after in (0, 1)]
    assert [after["scores"]["total"] for _, after in readme_figures.chosen(sides)] == [
        -13,
        -9,
        -5,
        -1,
    ]


def test_all_clips_are_in_the_mosaic(tmp_path):
    folder = make_run(tmp_path / "run", iterations=2, every=2, prompts=9)
    records, _ = readme_figures.sides_of(folder, 0, 2)
    assert readme_figures.mosaic(records).shape == (2 * (256 + 40), 8 * (256 + 40), 3)


def test_error_bars_are_half_of_a_95_percent_interval(tmp_path):
    run = read_run(make_run(tmp_path / "run", iterations=2, every=2, prompts=9))
    for ax, key in zip(readme_figures.curves(run).axes, readme_figures.CURVES, strict=True):
        values = [[clip.values[key] for clip in clips] for clips in validation_clips(run).values()]
        (bars,) = (collection.get_segments() for collection in ax.collections)
        halves = [(high - low) / 2 for (_, low), (_, high) in bars]
        assert halves == pytest.approx([interval(found).half for found in values])
    assert "95 %" in ax.figure.legends[0].get_texts()[1].get_text()


def test_a_run_without_a_validation_at_the_start_is_refused(tmp_path):
    folder = make_run(tmp_path / "run", iterations=1, every=50, prompts=2)
    with pytest.raises(SystemExit, match="two are needed: validate_at_step0 True"):
        readme_figures.main([str(folder), "--output", str(tmp_path)])
