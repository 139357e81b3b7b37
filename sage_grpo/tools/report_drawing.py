"""How a report's figures are drawn: one panel, one plot, in one style, as part of the page (inline SVG or PNG).

Shapes: N iterations that left a line, T denoising steps.
"""

import base64
import io
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from sage_grpo.tools.run_folder import Run, column

TRAIN, VALIDATION, GOLD, SETTING, REFERENCE, MASKED = "#2f6690", "#d9822b", "#3a7d5c", "#8a5a83", "#7b8794", "#d5dae0"
SMALL, WIDE, MAP = (3.9, 2.5), (6.0, 2.8), (4.8, 2.4)  # inches; the page shows them at 0.6 to 1.4 times that
STYLE = {
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": "#52606d",
    "axes.formatter.useoffset": False,
    "xtick.color": "#9aa5b1",
    "ytick.color": "#9aa5b1",
    "xtick.labelcolor": "#52606d",
    "ytick.labelcolor": "#52606d",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.formatter.limits": (-3, 4),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e8ecf0",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's own font
}
MANY = 40  # points, from which on a curve is drawn with its running mean


@dataclass(frozen=True)
class Panel:
    title: str
    words: str  # what it shows, and what is healthy
    picture: str  # HTML
    style: str  # class of its figure


def panel(
    title: str,
    words: str,
    draw: Callable[..., None],
    *args: Any,
    size: tuple[float, float] = SMALL,
    x: str = "iteration",
) -> Panel:
    """A figure of its own with one plot, made by `draw(axes, *args)`."""
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": title}):  # ids: the same each time, and no other panel's
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel(x)
        draw(axes, *args)
        picture = _png(figure, title) if size == MAP else _svg(figure, title)
    return Panel(title, words, picture, "wide" if size == WIDE else "")


def _svg(figure: Figure, title: str) -> str:
    """The drawing as an element of a page: no prologue, metadata or namespaces, no ids but those it refers to."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text[text.index("<svg") :])
    return re.sub(r'<g id="[^"]*">', "<g>", text).replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def _png(figure: Figure, title: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=180)
    return f'<img alt="{escape(title)}" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


def draw_curve(ax: Axes, x: np.ndarray, y: np.ndarray, colour: str, label: str | None) -> None:
    """The finite points as a line; many measured ones faint, under their running mean over a twentieth of them."""
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    if len(y) < MANY or colour == SETTING:
        ax.plot(x, y, "o-" if len(y) < MANY else "-", ms=3, color=colour, label=label)
        return
    window = np.ones(2 * (len(y) // MANY) + 1)
    mean = np.convolve(y, window, "same") / np.convolve(np.ones_like(y), window, "same")
    ax.plot(x, y, color=colour, lw=0.8, alpha=0.35)
    ax.plot(x, mean, color=colour, label=label)


def draw_curves(ax: Axes, run: Run, keys: Mapping[str, tuple[str, str | None]], logarithmic: bool = False) -> None:
    """Metrics of training, key -> (colour, label)."""
    if logarithmic:
        log_axis(ax, np.concatenate([column(run.train, key) for key in keys]))
    for key, (colour, label) in keys.items():
        if run.has(key):
            draw_curve(ax, column(run.train, "step"), column(run.train, key), colour, label)
    if ax.get_legend_handles_labels()[1]:
        ax.legend()


def log_axis(ax: Axes, values: np.ndarray) -> None:
    """A logarithmic y axis if a value allows one; with labels between the decades where it spans few."""
    positive = values[values > 0]
    if not len(positive):
        return
    ax.set_yscale("log", nonpositive="mask")
    span = positive.max() / positive.min()
    if span < 50:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if span > 10 else (1, 2, 3, 5, 7)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())


def draw_watched(ax: Axes, run: Run, key: str, colour: str, reference: tuple[str, float] | None) -> None:
    """A metric in training and, with standard errors, in validation; a dashed line to compare it with."""
    if run.has(key):
        draw_curve(ax, column(run.train, "step"), column(run.train, key), colour, "training")
    values = column(run.validations, key)
    if np.isfinite(values).any():
        error = np.nan_to_num(column(run.validations, f"{key}_stderr"))
        style = {"color": VALIDATION, "ms": 4, "capsize": 2, "lw": 1.2, "zorder": 3}
        ax.errorbar(column(run.validations, "step"), values, error, fmt="o-", label="validation", **style)
    if reference:
        ax.axhline(reference[1], ls="--", lw=1, color=REFERENCE, label=reference[0])
    ax.legend()


def draw_total(ax: Axes, run: Run, reference: tuple[str, float] | None) -> None:
    mean, std = column(run.train, "reward/total"), np.nan_to_num(column(run.train, "reward/std"))
    if len(mean) > 1:
        steps = column(run.train, "step")
        ax.fill_between(steps, mean - std, mean + std, color=TRAIN, alpha=0.12, lw=0, label="std of the batch")
    draw_watched(ax, run, "reward/total", TRAIN, reference)


def draw_scatter(ax: Axes, run: Run, key: str) -> None:
    """A gold metric against the reward, one dot per iteration."""
    steps = column(run.train, "step")
    dots = ax.scatter(column(run.train, "reward/total"), column(run.train, key), c=steps, s=12, linewidths=0)
    ax.figure.colorbar(dots, ax=ax, label="iteration").outline.set_visible(False)
    ax.set_ylabel(key)


def draw_map(ax: Axes, run: Run, key: str) -> None:
    """A metric by iteration and denoising step; grey where a step was not trained."""
    grid = np.ma.masked_invalid(run.grid(key).T)
    norm, colours, ticks = map_scale(key, grid.compressed())
    cells = np.arange(len(grid) + 1) - 0.5
    mesh = ax.pcolormesh(edges(column(run.train, "step")), cells, grid, norm=norm, cmap=colours)
    ax.set_facecolor(MASKED)
    ax.grid(False)
    ax.invert_yaxis()
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylabel("denoising step")
    ax.figure.colorbar(mesh, ax=ax, pad=0.02, ticks=ticks).outline.set_visible(False)


def map_scale(key: str, values: np.ndarray) -> tuple[Normalize, str, list[float] | None]:
    """Scale, colours and labels of a heat map, None leaving the labels to the scale; `values` are its finite cells."""
    if key == "clip_fraction":
        return Normalize(0, 1), "Blues", None
    if key == "log_ratio_mean":
        reach = float(np.abs(values).max()) or 1.0
        far = 10.0 ** math.floor(math.log10(reach))
        ticks = [-far, -far / 10, -far / 100, 0.0, far / 100, far / 10, far]
        return SymLogNorm(far / 1000, vmin=-reach, vmax=reach), "RdBu_r", ticks
    positive = values[values > 0]
    if len(positive) and positive.min() < positive.max():
        return LogNorm(positive.min(), positive.max()), "viridis", None
    return Normalize(), "viridis", None


def draw_schedule(ax: Axes, schedule: Mapping[str, list[float | None]], keys: Mapping[str, str | None]) -> None:
    """Numbers per denoising step, key -> label; those with a label are factors, on a logarithmic axis."""
    for (key, label), colour in zip(keys.items(), (TRAIN, VALIDATION), strict=False):
        ax.plot(np.array(schedule.get(key) or [], dtype=float), "o-", ms=2.5, color=colour, label=label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if all(keys.values()):
        ax.set_yscale("log", nonpositive="mask")
        ax.legend()


def draw_stack(ax: Axes, steps: np.ndarray, layers: Mapping[str, np.ndarray], colours: Mapping[str, str]) -> None:
    """Bars of stacked seconds, name -> (N,), without gaps between iterations."""
    x = edges(steps).repeat(2)[1:-1]
    heights = [np.nan_to_num(values).repeat(2) for values in layers.values()]
    ax.stackplot(x, heights, colors=[colours[name] for name in layers], lw=0)
    ax.set_ylabel("seconds")
    ax.margins(x=0)


def edges(steps: np.ndarray) -> np.ndarray:
    """Borders (N+1,) half-way between iterations, so that runs which log every k-th one show no holes."""
    if len(steps) == 1:
        return steps[0] + np.array([-0.5, 0.5])
    middle = (steps[1:] + steps[:-1]) / 2
    return np.array([2 * steps[0] - middle[0], *middle, 2 * steps[-1] - middle[-1]])
