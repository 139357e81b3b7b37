"""How the figures of a report are drawn: SVG panels that follow the colors of the page.

Shapes: N logged iterations, T denoising steps.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, MaxNLocator

from sage_grpo.intervals import Interval, interval, student_95
from sage_grpo.runs.history import column
from sage_grpo.tools.figure_style import BLUE, GREY, ORANGE, STYLE
from sage_grpo.tools.templating import inline_svg

# inches; the page scales them by 0.6 to 1.4
SMALL = (3.9, 2.5)
WIDE = (6.0, 2.8)
MAP = (4.8, 2.4)
MARGIN = 0.05
MANY = 40  # points from which on a curve is drawn as its running mean
# values on either side that a running mean includes: a twentieth of all, but enough to see through the noise
REACH = 0.05
MIN_REACH = 10

Lines = Sequence[Mapping[str, Any]]  # of metrics.jsonl


@dataclass(frozen=True)
class Panel:
    """A figure on the page."""

    title: str
    svg: Markup
    caption: str
    wide: bool


@dataclass(frozen=True)
class Curve:
    """A metric over iterations."""

    lines: Lines
    metric: str
    color: str
    label: str

    @property
    def values(self) -> np.ndarray:
        """(N,), NaN where the metric is missing."""
        return column(self.lines, self.metric)


def panel(
    title: str, caption: str, draw: Callable[[Axes], None], size: tuple[float, float] = SMALL
) -> Panel:
    """One plot, drawn by `draw(axes)`."""
    # backgrounds are the page's; the salt makes ids reproducible, and unique per panel
    settings = {"figure.facecolor": "none", "axes.facecolor": "none", "svg.hashsalt": title}
    with matplotlib.rc_context(settings, STYLE):
        figure = Figure(figsize=size)
        axes = figure.subplots()
        axes.set_xlabel("iteration")
        draw(axes)
        fit(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg")
    return Panel(title, inline_svg(buffer.getvalue(), title), caption, wide=size == WIDE)


def fit(figure: Figure) -> None:
    """Give the axes all that their labels leave, at least a tenth of the figure, however long a label is.

    Matplotlib's own layouts draw a figure twice and measure it thrice.
    """
    width, height = figure.get_size_inches()
    taken = figure.get_tightbbox()
    margins = figure.subplotpars
    left = min(0.8, margins.left + (MARGIN - taken.x0) / width)
    right = margins.right + (width - MARGIN - taken.x1) / width
    bottom = min(0.8, margins.bottom + (MARGIN - taken.y0) / height)
    top = margins.top + (height - MARGIN - taken.y1) / height
    figure.subplots_adjust(left, bottom, max(right, left + 0.1), max(top, bottom + 0.1))


SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class PlainPowers(LogFormatterSciNotation):
    """Labels of a log axis as plain text: to typeset them as formulas takes a fifth of the time of a report."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        label = super().__call__(x, pos)
        formula = re.fullmatch(r"\$\\mathdefault{(.*?)(?:\^{(-?\d+)})?}\$", label)
        if not formula:
            return label
        text, power = formula.groups(default="")
        return text.replace(r"\times", "·").replace("-", "−") + power.translate(SUPERSCRIPTS)


def label_powers(axis: Axis) -> None:
    """Label an axis plainly if it is logarithmic."""
    if isinstance(axis.get_major_formatter(), LogFormatterSciNotation):
        axis.set_major_formatter(PlainPowers())
    if isinstance(axis.get_minor_formatter(), LogFormatterSciNotation):
        axis.set_minor_formatter(PlainPowers(labelOnlyBase=False))


# curves


def draw_curves(
    axes: Axes,
    curves: Sequence[Curve],
    limits: Mapping[str, float],
    log_scale: bool = False,
    smooth: bool = True,
) -> None:
    """Draw curves of related metrics; validations with 95 % intervals, from their standard errors.

    limits: label -> value that can be reached.
    """
    for curve in curves:
        steps = column(curve.lines, "step")
        errors = column(curve.lines, f"{curve.metric}_stderr")
        if np.isfinite(errors).any():
            counts = column(curve.lines, "count")
            factors = [student_95(count - 1) if count > 2 else 0.0 for count in counts]
            halves = np.nan_to_num(errors * factors)
            draw_intervals(axes, steps, curve.values, halves, curve.color, curve.label, lw=1.2)
        else:
            draw_curve(axes, steps, curve.values, curve.color, curve.label, smooth)
    for label, value in limits.items():
        axes.axhline(value, ls="--", lw=1, color=GREY, label=label)
    finish(axes, log_scale)


def draw_breaks(axes: Axes, iterations: Sequence[int]) -> None:
    """Draw a vertical line where the yardstick changed, behind everything else."""
    for iteration in iterations:
        axes.axvline(iteration, ls=":", lw=1.2, color=GREY, zorder=0)


def is_long(values: np.ndarray) -> bool:
    """Whether a metric has enough finite values for a running mean."""
    return bool(np.isfinite(values).sum() >= MANY)


def draw_curve(
    axes: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str, smooth: bool = True
) -> None:
    """Draw the finite points as a line; if there are many, as faint dots under a running mean and its band."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if not is_long(y):
        axes.plot(x, y, "o-", ms=3, color=color, label=label)
        return
    if not smooth:
        axes.plot(x, y, "-", ms=3, color=color, label=label)
        return
    means, halves = running_mean(y, max(MIN_REACH, round(REACH * len(y))))
    axes.plot(x, y, "o", ms=2.5, mew=0, color=color, alpha=0.35)
    low = np.clip(means - halves, y.min(), y.max())  # inside, for a log scale too
    high = np.clip(means + halves, y.min(), y.max())
    axes.fill_between(x, low, high, color=color, alpha=0.2, lw=0)
    axes.plot(x, means, color=color, label=label)


def running_mean(values: np.ndarray, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """Means of (N,) over `reach` values to either side, fewer at the ends, and half of their 95 % intervals."""
    means = np.empty_like(values)
    halves = np.empty_like(values)
    for i in range(len(values)):
        window = interval(values[max(0, i - reach) : i + reach + 1])
        means[i] = window.mean
        halves[i] = window.half
    return means, halves


def draw_intervals(
    axes: Axes,
    x: Sequence[float],
    means: Sequence[float],
    halves: Sequence[float],
    color: str,
    label: str,
    **style: Any,
) -> None:
    axes.errorbar(x, means, halves, fmt="o-", ms=4, capsize=2, color=color, label=label, **style)


def finish(axes: Axes, log_scale: bool) -> None:
    """Set integer ticks, a log axis if it is wanted and a value is positive, and a legend if there is a choice."""
    axes.xaxis.set_major_locator(integer_ticks())
    label_single_points(axes)
    if log_scale and any((np.asarray(line.get_ydata()) > 0).any() for line in axes.lines):
        axes.set_yscale("log", nonpositive="mask")
        label_powers(axes.yaxis)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend()


def label_single_points(axes: Axes) -> None:
    """If there is a single iteration, begin its axis at 0 and write the values beside the dots."""
    # neither limits, which reach all across, nor the ends of error bars
    curves = [line for line in axes.lines if line.get_marker() == "o"]
    dots = [line for line in curves if len(line.get_xdata()) == 1]
    iterations = {float(line.get_xdata()[0]) for line in dots}
    if len(dots) < len(curves) or len(iterations) != 1:
        return
    (iteration,) = iterations
    axes.set_xlim(0, max(1.0, 1.3 * iteration))
    for line in dots:
        value = float(line.get_ydata()[0])
        axes.annotate(
            f"{value:.3g}", (iteration, value), (6, 0), textcoords="offset points", va="center"
        )


def integer_ticks() -> MaxNLocator:
    return MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)


def draw_drift(axes: Axes, changes: Mapping[str, Mapping[int, Interval]]) -> None:
    """Draw changes since the first validation: name -> iteration -> mean change."""
    for (name, by_iteration), color in zip(changes.items(), (BLUE, ORANGE), strict=True):
        means = [change.mean for change in by_iteration.values()]
        halves = np.nan_to_num([change.half for change in by_iteration.values()])
        draw_intervals(axes, list(by_iteration), means, halves, color, name)
    axes.axhline(0, ls="--", lw=1, color=GREY)
    axes.legend()


def draw_scatter(axes: Axes, steps: np.ndarray, reward: np.ndarray, gold: np.ndarray) -> None:
    """Draw one dot per iteration, (N,) each."""
    dots = axes.scatter(reward, gold, c=steps, s=12, linewidths=0)
    axes.figure.colorbar(dots, ax=axes, fraction=0.05, label="iteration").outline.set_visible(False)
    axes.set(xlabel="reward in training", ylabel="gold/match")


# maps and stacks


def draw_map(axes: Axes, train: Lines, values: np.ndarray, norm: Normalize, colors: str) -> None:
    """Draw a metric (N, T) by iteration and denoising step; gray where a step was not trained."""
    grid = np.ma.masked_invalid(values.T)
    extent = (train[0]["step"] - 0.5, train[-1]["step"] + 0.5, len(grid) - 0.5, -0.5)
    picture = axes.imshow(grid, colors, norm, aspect="auto", extent=extent, interpolation="none")
    axes.set(facecolor=f"{GREY}55", ylabel="denoising step")
    axes.grid(False)
    axes.xaxis.set_major_locator(integer_ticks())
    axes.yaxis.set_major_locator(integer_ticks())
    bar = axes.figure.colorbar(picture, ax=axes, fraction=0.05, pad=0.02)
    bar.outline.set_visible(False)
    label_powers(bar.ax.yaxis)


def symmetric_scale(values: np.ndarray) -> Normalize:
    """Logarithmic on both sides of 0."""
    reach = np.nanmax(np.abs(values)) or 1.0
    return SymLogNorm(reach / 100, vmin=-reach, vmax=reach)


def log_scale(values: np.ndarray) -> Normalize:
    """Logarithmic if there is a positive value."""
    return LogNorm() if (values > 0).any() else Normalize()


def draw_stack(
    axes: Axes, steps: np.ndarray, layers: Mapping[str, np.ndarray], colors: Mapping[str, str]
) -> None:
    """Draw stacked seconds, phase -> (N,); the legend has their means and shares."""
    total = sum(seconds.sum() for seconds in layers.values())
    labels = [
        f"{phase} {seconds.mean():.3g} s, {seconds.sum() / total:.0%}"
        for phase, seconds in layers.items()
    ]
    layer_colors = [colors.get(phase, GREY) for phase in layers]
    if len(steps) == 1:  # an area needs two
        steps = steps[0] + np.array([-0.5, 0.5])
        layers = {phase: np.repeat(seconds, 2) for phase, seconds in layers.items()}
    axes.stackplot(steps, *layers.values(), colors=layer_colors, labels=labels, lw=0)
    axes.xaxis.set_major_locator(integer_ticks())
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    axes.set_ylabel("seconds")
    axes.margins(x=0)
