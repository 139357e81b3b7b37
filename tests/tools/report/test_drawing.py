"""How curves are drawn: long ones as a mean with its band, single points where one can see what they are."""

import numpy as np
import pytest
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from sage_grpo.intervals import student_95
from sage_grpo.tools.report.drawing import (
    MANY,
    MAP,
    Curve,
    draw_curve,
    draw_curves,
    draw_map,
    draw_stack,
    fit,
    label_powers,
    log_scale,
    running_mean,
)


@pytest.fixture
def axes():
    return Figure().subplots()


def test_a_running_mean_has_the_interval_of_its_window():
    values = np.array([1.0, 2.0, 4.0, 3.0, 0.0])
    means, halves = running_mean(values, reach=1)
    assert means == pytest.approx([1.5, 7 / 3, 3.0, 7 / 3, 1.5])
    assert np.isnan(halves[[0, 4]]).all()  # two values have none
    assert halves[2] == pytest.approx(student_95(2) * values[1:4].std(ddof=1) / 3**0.5)


def test_a_long_noisy_curve_is_a_mean_with_a_band_over_all_of_its_points(axes):
    rng = np.random.default_rng(0)
    steps = np.arange(1.0, 2 * MANY + 1)
    truth = 1 + 0.02 * steps
    draw_curve(axes, steps, truth + 0.5 * rng.standard_normal(len(steps)), "red", "training")
    dots, mean = axes.lines
    assert len(dots.get_xdata()) == len(mean.get_xdata()) == 2 * MANY
    error = np.abs(mean.get_ydata() - truth)
    assert error.mean() < np.abs(dots.get_ydata() - truth).mean() / 2

    (band,) = axes.collections
    low, high = band.get_paths()[0].get_extents().intervaly
    assert low < mean.get_ydata().min()
    assert high > mean.get_ydata().max()


def test_a_single_iteration_is_shown_on_an_axis_from_0_with_its_value(axes):
    lines = [{"step": 8, "kl/anchor": 0.0123, "reward/total": 1.5}]
    draw_curves(axes, [Curve(lines, "kl/anchor", "blue", "to the anchor")], {"limit": 2.0})
    assert axes.get_xlim()[0] == 0
    assert axes.get_xlim()[1] > 8
    assert [text.get_text() for text in axes.texts] == ["0.0123"]


def test_two_iterations_need_no_labels(axes):
    lines = [{"step": step, "kl/anchor": 0.01 * step} for step in (4, 8)]
    draw_curves(axes, [Curve(lines, "kl/anchor", "blue", "to the anchor")], {})
    assert not axes.texts


def test_maps_and_stacks_of_one_iteration_have_whole_numbers_on_their_axes(axes):
    values = np.array([[1.0, 2.0, 3.0]])
    draw_map(axes, [{"step": 8}], values, log_scale(values), "viridis")
    ticks = axes.xaxis.get_major_locator().tick_values(*axes.get_xlim())
    assert all(tick == int(tick) for tick in ticks)

    stack = Figure().subplots()
    draw_stack(stack, np.array([8.0]), {"rollout": np.array([2.0]), "update": np.array([1.0])}, {})
    low, high = stack.collections[0].get_paths()[0].get_extents().intervalx
    assert low < 8 < high


PARTS = {
    "curve": lambda axes: draw_curves(
        axes, [Curve([{"step": i, "kl": 10.0**-i} for i in (1, 2)], "kl", "red", "KL")], {}, True
    ),
    "map": lambda axes: draw_map(
        axes, [{"step": 1}, {"step": 2}], np.array([[1e-5], [1e-3]]), LogNorm(), "viridis"
    ),
    "stack": lambda axes: draw_stack(
        axes, np.arange(3.0), {"a phase with a long name": np.full(3, 1e6)}, {}
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_labels_and_legends_lie_within_the_figure(part):
    figure = Figure(figsize=MAP)
    PARTS[part](figure.subplots())
    fit(figure)
    width, height = MAP
    taken = figure.get_tightbbox()
    assert taken.x0 >= 0 and taken.y0 >= 0 and taken.x1 <= width and taken.y1 <= height
    assert taken.width > 0.85 * width and taken.height > 0.85 * height


def test_a_label_longer_than_the_figure_leaves_room_for_the_axes(axes):
    draw_stack(axes, np.arange(3.0), {"long " * 100: np.ones(3)}, {})
    fit(axes.figure)
    assert axes.get_position().width >= 0.099 and axes.get_position().height > 0.5


def test_powers_of_ten_are_plain_text(axes):
    axes.set(yscale="log", ylim=(1e-3, 5e-3))
    label_powers(axes.yaxis)
    label = axes.yaxis.get_major_formatter()
    assert [label(value) for value in (1e-3, 1.0, 1e12)] == ["10⁻³", "10⁰", "10¹²"]
    between = axes.yaxis.get_minor_formatter()
    between.set_locs([2e-3])
    assert between(2e-3) == "2·10⁻³"

    axes.set_yscale("symlog", linthresh=1e-4)
    label_powers(axes.yaxis)
    label = axes.yaxis.get_major_formatter()
    assert [label(value) for value in (-1e-3, 0.0)] == ["−10⁻³", "0"]
