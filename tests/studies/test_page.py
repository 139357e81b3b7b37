"""One command builds page and figures from the results alone; the committed page matches its output."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from studies import page as program
from studies import records, result_tables
from studies.questions import SDES, STUDIES, StudyPlan
from tests.studies.invented_results import invented

SOME = {name: STUDIES[name] for name in ("last_step", "balancing", "schedules")}
PLAN = StudyPlan(seeds=3, studies=SOME)


@pytest.fixture
def place(tmp_path):
    (tmp_path / "results").mkdir()
    for run in PLAN.runs.values():
        gain = 0.4 - 0.2 * (run.arm == "all") + 0.01 * run.seed**2 * (1 + (run.arm == "all"))
        records.write(tmp_path / "results" / f"{run.name}.json", invented(run, gain))
    return tmp_path


def call(place):
    return program.main(["--results", str(place / "results"), "--page", str(place / "docs" / "results.md")], SOME)


def test_one_command_makes_the_figures_and_the_tables_of_a_page(place):
    page, folder = place / "docs" / "results.md", place / "docs" / "figures"
    page.parent.mkdir()
    names = ("last_step", "balancing", "gradients", "std")
    links = "\n".join(f"![{name}](figures/results_{name}.png)" for name in names)  # of all but one
    words = f"# Mine\n\n{links}\n\n<!-- results last_step -->\nstale\n<!-- end of results -->\n\nWhat it means.\n"
    page.write_text(words)
    assert call(place) == 0
    assert {path.name for path in folder.iterdir()} == {f"results_{name}.png" for name in names}
    text = page.read_text()
    assert text.startswith("# Mine\n") and text.endswith("\nWhat it means.\n") and "stale" not in text
    row = next(line for line in text.splitlines() if line.startswith("| all less all but last |"))
    assert row.split("|")[3].strip().startswith("−0.153 (−0.254 to −0.053)")


def test_a_page_begins_with_all_tables_and_figures(place):
    made = result_tables.tables(PLAN, SOME, records.read_all(place / "results"))
    text = result_tables.first_page(SOME, made, {"last_step": "figures/results_last_step.png"})
    assert all(made[name] in text and SOME[name].question in text for name in SOME)
    assert "![last_step](figures/results_last_step.png)" in text and "![balancing]" not in text


def test_results_of_no_study_are_refused(place, capsys):
    path = next((place / "results").glob("last_step-all-1.json"))
    record = records.read(path)
    config = record["config"] | {"eta": 0.1}
    records.write(path, record | {"config": config, "digest": records.digest(config)})
    assert call(place) == 2
    assert "1 results are of no study any more, such as last_step-all-1" in capsys.readouterr().err


def test_the_page_of_the_repository_is_what_its_results_say():
    page, folder = program.ROOT / "studies" / "results.md", program.ROOT / "studies" / "results"
    found = records.read_all(folder)
    assert page.is_file() == bool(found)
    if found:
        text = page.read_text()
        assert result_tables.refreshed(text, result_tables.tables(StudyPlan(), STUDIES, found)) == text


def lines_of(plot, shape):
    axes = Figure().subplots(*shape, squeeze=False)
    arms = result_tables.arms_of(PLAN, "balancing", SOME["balancing"], {k: invented(r) for k, r in PLAN.runs.items()})
    plot(axes, arms)
    return axes


def test_measured_gradients_stand_beside_the_prediction():
    """Without the equalizer the line is |b|/std, scaled to the dots 1, 2, 4, 8; with it the line is flat."""
    without, with_it = lines_of(program.draw_gradients, (1, 2)).flat
    sage_line, sage_dots = without.lines[:2]
    assert sage_dots.get_ydata().tolist() == [1, 2, 4, 8] and sage_dots.get_label() == "sage"
    scale = np.array([0.0617, 0.1978, 0.3735, 0.7161])  # of sage at eta 0.7, from the exact schedule
    line = sage_line.get_ydata()
    assert line / line[0] == pytest.approx(scale / scale[0], rel=1e-3)
    assert np.log(line).mean() == pytest.approx(np.log([1, 2, 4, 8]).mean(), rel=1e-6)
    assert np.ptp(with_it.lines[0].get_ydata()) < 1e-5 and len(with_it.lines) == 2 * len(SDES)


def test_bands_are_intervals_over_seeds():
    ax = Figure().subplots()
    run = next(iter(PLAN.runs.values()))
    found = [invented(run, gain) for gain in (0.1, 0.2, 0.3)]
    program.band(ax, found, "reward/total", "red", "arm")
    line, dots, *_ = ax.lines
    area = ax.collections[0]
    assert dots.get_xdata().tolist() == [0, 60, 120] and dots.get_ydata() == pytest.approx([0.6, 0.7, 0.8])
    assert line.get_xdata().tolist() == found[0]["steps"] and line.get_ydata()[20] == pytest.approx(0.7026, abs=1e-3)
    reach = area.get_paths()[0].vertices[:, 1]
    assert reach.max() == pytest.approx(line.get_ydata()[-1] + 4.303 * 0.095 / 3**0.5, rel=0.01)


def test_dots_of_arms_stand_side_by_side_around_their_iteration():
    ax = Figure().subplots()
    found = invented(next(iter(PLAN.runs.values())), 0.1)
    program.bands(ax, {"a": {1: found}, "b": {}, "c": {1: found}}, "reward/total")
    lines = {line.get_color(): line for line in ax.lines if line.get_marker() == "o"}
    first, last = (lines[colour].get_xdata() for colour in (program.COLOURS[0], program.COLOURS[2]))
    assert (first + last) / 2 == pytest.approx([0, 60, 120]) and (last - first > 1).all()


def test_panels_are_as_high_as_their_lines_and_bars():
    """A wide band is cut, a bar is not, and panels that share an axis have one height."""
    axes = Figure().subplots(1, 2, squeeze=False, sharey=True)
    axes[0, 0].plot([1, 2], [1.0, 2.0], label="arm")
    axes[0, 0].fill_between([1, 2], [-50.0, -50.0], [50.0, 50.0])
    axes[0, 1].errorbar([1, 2], [3.0, 3.0], [0.0, 8.0])
    program.finish(axes)
    for ax in axes.flat:
        assert ax.get_ylim() == pytest.approx((-5 - 0.15 * 16, 11 + 0.15 * 16))
    assert [text.get_text() for text in axes[0, 0].get_legend().get_texts()] == ["arm"]


def test_curves_are_of_the_seeds_that_all_arms_have():
    arms = {"a": {1: "a1", 2: "a2"}, "b": {2: "b2", 3: "b3"}, "c": {}}
    assert program.paired(arms) == {"a": {2: "a2"}, "b": {2: "b2"}, "c": {}}


def test_running_means_leave_gaps_out():
    values = np.array([1.0, np.nan, 3.0, 3.0, 3.0, 5.0])
    assert program.smooth(values) == pytest.approx([2.0, 7 / 3, 2.5, 3.5, 3.5, 11 / 3])
