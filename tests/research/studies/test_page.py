"""One command builds page and figures from the results alone; the committed page matches its output."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from research.studies import page as program
from research.studies import records, result_tables, second_edition, third_edition
from research.studies.questions import RECIPE, SDES, STUDIES, StudyPlan
from sage_grpo.intervals import Interval
from sage_grpo.tools.figure_style import SAMPLERS
from tests.research.studies.invented_results import invented

SOME = {name: STUDIES[name] for name in ("last_step", "balancing", "schedules")}
PLAN = StudyPlan(seeds=3, studies=SOME)


@pytest.fixture
def place(tmp_path):
    for run in PLAN.runs.values():
        gain = 0.4 - 0.2 * (run.arm == "all") + 0.01 * run.seed**2 * (1 + (run.arm == "all"))
        records.append(tmp_path / "results.jsonl", invented(run, gain))
    return tmp_path


def call(place):
    return program.main(
        ["--results", str(place / "results.jsonl"), "--page", str(place / "docs" / "results.md")],
        SOME,
    )


@pytest.mark.slow
def test_one_command_makes_the_figures_and_the_tables_of_a_page(place):
    """Slow: draws all figures of a page."""
    page, folder = place / "docs" / "results.md", place / "docs" / "figures"
    page.parent.mkdir()
    names = ("last_step", "balancing", "gradients", "std")
    links = "\n".join(f"![{name}](figures/results_{name}.png)" for name in names)  # of all but one
    words = f"# Mine\n\n{links}\n\n<!-- results last_step -->\nstale\n<!-- end of results -->\n\nWhat it means.\n"
    page.write_text(words)
    assert call(place) == 0
    assert {path.name for path in folder.iterdir()} == {f"results_{name}.png" for name in names}
    text = page.read_text()
    assert (
        text.startswith("# Mine\n") and text.endswith("\nWhat it means.\n") and "stale" not in text
    )
    row = next(line for line in text.splitlines() if line.startswith("| all minus all but last |"))
    assert row.split("|")[3].strip().startswith("−0.153 (−0.254 to −0.053)")


def test_a_page_begins_with_all_tables_and_figures(place):
    made = result_tables.tables(PLAN, SOME, records.read_all(place / "results.jsonl"))
    text = result_tables.first_page(SOME, made, {"last_step": "figures/results_last_step.png"})
    assert all(made[name] in text and SOME[name].question in text for name in SOME)
    assert "![last_step](figures/results_last_step.png)" in text and "![balancing]" not in text


def test_results_of_no_study_are_refused(place, capsys):
    path = place / "results.jsonl"
    *others, record = sorted(
        records.read_lines(path), key=lambda record: records.name_of(record) == "last_step-all-1"
    )
    config = record["config"] | {"eta": 0.1}
    records.write_lines(
        path, [*others, record | {"config": config, "digest": records.digest(config)}]
    )
    assert call(place) == 2
    assert (
        "1 results belong to no study any more, such as last_step-all-1" in capsys.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", ["first_edition", "results", "results_3"])
def test_the_pages_of_the_repository_are_what_their_results_say(page):
    """Slow: recomputes the pages from all recorded runs."""
    text = (program.HERE / f"{page}.md").read_text()
    recipe, asked, more, results = RECIPE, STUDIES, {}, program.RECORDS / "first.jsonl"
    if page == "results":
        recipe, results = second_edition.RECIPE, second_edition.RESULTS
        asked, more = second_edition.studies(), second_edition.more_tables()
    elif page == "results_3":
        recipe, results = second_edition.RECIPE, third_edition.RESULTS
        asked = third_edition.studies()
        more = third_edition.more_tables(asked)
    plan = StudyPlan(recipe=recipe, studies=asked)
    found = records.read_all(results)
    assert len(found) > 100
    assert result_tables.refreshed(text, result_tables.tables(plan, asked, found, more)) == text


def lines_of(plot, shape):
    axes = Figure().subplots(*shape, squeeze=False)
    arms = result_tables.arms_of(
        PLAN, "balancing", SOME["balancing"], {k: invented(r) for k, r in PLAN.runs.items()}
    )
    plot(axes, arms)
    return axes


def test_named_arms_keep_their_colors_and_the_others_are_grey():
    arms = result_tables.arms_of(
        PLAN, "balancing", SOME["balancing"], {k: invented(r) for k, r in PLAN.runs.items()}
    )
    axes = Figure().subplots(1, 4)
    program.draw_differences(axes, SOME["balancing"], arms, {"cps off": "red"})
    colors = [line.get_color() for line in axes[0].lines if line.get_marker() == "o"]
    assert colors.count("red") == 1 and colors.count(program.GREY) == len(colors) - 1


def test_measured_gradients_stand_beside_the_prediction():
    """Without the equalizer the line is |b|/std, scaled to the dots 1, 2, 4, 8; with it the line is flat."""
    without, with_it = lines_of(program.draw_gradients, (1, 2)).flat
    sage_line, sage_dots = without.lines[:2]
    assert sage_dots.get_ydata().tolist() == [1, 2, 4, 8] and sage_dots.get_label() == "sage"
    scale = np.array(
        [0.0617, 0.1978, 0.3735, 0.7161]
    )  # of sage at eta 0.7, from the exact schedule
    line = sage_line.get_ydata()
    assert line / line[0] == pytest.approx(scale / scale[0], rel=1e-3)
    assert np.log(line).mean() == pytest.approx(np.log([1, 2, 4, 8]).mean(), rel=1e-6)
    assert np.ptp(with_it.lines[0].get_ydata()) < 1e-5 and len(with_it.lines) == 2 * len(SDES)


def test_curves_are_means_over_seeds():
    ax = Figure().subplots()
    run = next(iter(PLAN.runs.values()))
    found = [invented(run, gain) for gain in (0.1, 0.2, 0.3)]
    program.draw_arm(ax, found, "reward/total", "red", "arm")
    line, dots = ax.lines
    assert dots.get_xdata().tolist() == [0, 60, 120] and dots.get_ydata() == pytest.approx(
        [0.6, 0.7, 0.8]
    )
    assert line.get_xdata().tolist() == found[0]["steps"] and line.get_ydata()[20] == pytest.approx(
        0.7026, abs=1e-3
    )


def test_dots_of_arms_stand_side_by_side_around_their_iteration():
    ax = Figure().subplots()
    found = invented(next(iter(PLAN.runs.values())), 0.1)
    program.draw_arms(ax, {"sage": {1: found}, "dance": {}, "cps": {1: found}}, "reward/total")
    lines = {line.get_color(): line for line in ax.lines if line.get_marker() == "o"}
    first, last = (lines[SAMPLERS[name]].get_xdata() for name in ("sage_grpo", "cps"))
    assert (first + last) / 2 == pytest.approx([0, 60, 120]) and (last - first > 1).all()


def test_a_forest_has_a_row_for_each_difference_filled_where_it_is_decided():
    ax = Figure().subplots()
    rows = {"a": Interval(0.5, 0.2), "b": Interval(-0.1, 0.4), "c": Interval(0.3, float("nan"))}
    program.forest(ax, rows, dict.fromkeys(rows, "red"), {"a"})
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert [(dot.get_xdata()[0], dot.get_ydata()[0]) for dot in dots] == [
        (0.5, 0),
        (-0.1, 1),
        (0.3, 2),
    ]
    assert [dot.get_markerfacecolor() for dot in dots] == ["red", "white", "white"]
    bars = [bar.get_segments()[0][:, 0] for bar in ax.collections]
    assert bars[0] == pytest.approx([0.3, 0.7]) and bars[1] == pytest.approx([-0.5, 0.3])
    assert [text.get_text() for text in ax.get_yticklabels()] == ["a", "b", "c"]
    bottom, top = ax.get_ylim()
    assert bottom > top, "the first is on top"


def test_differences_are_those_of_the_tables():
    study = SOME["balancing"]
    found = {
        key: invented(run, 0.4 - 0.2 * (run.arm == "cps off") + 0.01 * run.seed)
        for key, run in PLAN.runs.items()
    }
    arms = result_tables.arms_of(PLAN, "balancing", study, found)
    axes = Figure().subplots(1, 4)
    program.draw_differences(axes, study, arms, {})
    dots = [line for line in axes[0].lines if line.get_marker() == "o"]
    expected = [d["reward"].change.mean for d in result_tables.compared(study, arms).values()]
    assert [dot.get_xdata()[0] for dot in dots] == pytest.approx(expected) and min(expected) < -0.1
    colors = [SAMPLERS[name] for name in ("sage_grpo", "dance_grpo", "flow_grpo", "cps", "precise")]
    assert [dot.get_color() for dot in dots] == colors
    assert axes[2].get_title() == "gold prompt distance, lower is better"


def test_legends_name_the_variable_and_order_numbers():
    assert (
        program.variable_of("eta", STUDIES["eta"]) == "eta"
        and program.variable_of("sde", STUDIES["sde"]) == "SDE"
    )
    assert program.variable_of("kl_steps", STUDIES["kl_steps"]) == "kl steps"
    assert list(program.ordered(dict.fromkeys(("0.7", "0.3", "1", "1e-05")))) == [
        "1e-05",
        "0.3",
        "0.7",
        "1",
    ]
    assert list(program.ordered(dict.fromkeys(("b", "0.3")))) == ["b", "0.3"]
    axes = Figure().subplots(1, 2, squeeze=False)
    axes[0, 0].plot([1, 2], [1.0, 2.0], label="arm")
    program.finish(axes, "eta")
    legend = axes[0, 0].get_legend()
    assert legend.get_title().get_text() == "eta" and [
        text.get_text() for text in legend.get_texts()
    ] == ["arm"]


def test_curves_are_of_the_seeds_that_all_arms_have():
    arms = {"a": {1: "a1", 2: "a2"}, "b": {2: "b2", 3: "b3"}, "c": {}}
    assert program.paired(arms) == {"a": {2: "a2"}, "b": {2: "b2"}, "c": {}}


def test_running_means_leave_gaps_out():
    values = np.array([1.0, np.nan, 3.0, 3.0, 3.0, 5.0])
    assert program.smooth(values) == pytest.approx([2.0, 7 / 3, 2.5, 3.5, 3.5, 11 / 3])
