"""The figures of a report and their captions. Metrics that a run did not record are left out.

Shapes: N logged iterations, T denoising steps.
"""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sage_grpo.intervals import Interval
from sage_grpo.runs.history import RunHistory, as_float, column, numbers
from sage_grpo.tools.paired import drift
from sage_grpo.tools.templating import inline_svg

TEMPLATES = Path(__file__).with_name("templates")
STYLE = TEMPLATES / "report.mplstyle"
BLUE, ORANGE, GREEN, PURPLE, GREY, MASKED = "#2f6690", "#d9822b", "#3a7d5c", "#8a5a83", "#7b8794", "#d5dae0"
SMALL, WIDE, MAP = (3.9, 2.5), (6.0, 2.8), (4.8, 2.4)  # inches; the page scales them by 0.6 to 1.4
MANY = 40  # points above which a curve is drawn with its running mean
Lines = Mapping[str, tuple[str, str]]  # metric -> color, label
Panel = dict[str, Any]  # title, svg, words, wide
FIGURES = json.loads((TEMPLATES / "figures.json").read_text())  # section -> title -> lines, or the metric of a map
COLORS = {"blue": BLUE, "orange": ORANGE, "green": GREEN, "purple": PURPLE, "grey": GREY}  # by their names in FIGURES
LOGARITHMIC = {"kl/anchor", "kl/coef", "policy/grad_norm", "policy/ratio_max_deviation", "equalizer"}
PHASES = {"rollout": BLUE, "decode": "#7fa6c4", "reward": ORANGE, "gold": GREEN, "anchor": "#c9b458", "update": PURPLE}
# what a figure shows, and what healthy looks like
WORDS = json.loads((TEMPLATES / "captions.json").read_text())


def panels(run: RunHistory) -> dict[str, list[Panel]]:
    """The figures of each section."""
    scores = {name: {f"reward/{name}": ("blue", "training")} for name in run.scores}
    holdouts = {key: {key: ("green", "")} for key in sorted(run.holdouts)}
    maps = {title: key for title, key in FIGURES["Maps"].items() if np.isfinite(run.grid(key)).any()}
    schedule, phases = run.head.get("schedule"), phase_seconds(run)
    plans = FIGURES["Schedule"] if schedule else {}
    found = {
        "Reward": curve_panels(run, FIGURES["Reward"] | scores),
        "Hold-out": curve_panels(run, holdouts),
        "Gold": curve_panels(run, FIGURES["Gold"]),
        "Trust region and updates": curve_panels(run, FIGURES["Updates"]),
        "By denoising step": [panel(title, draw_map, run, key, size=MAP) for title, key in maps.items()],
        "Schedule": [panel(title, draw_schedule, schedule, lines) for title, lines in plans.items()],
        "Time": [panel("Time per iteration", draw_stack, run, phases, size=WIDE)] if phases else [],
    }
    if changes := drift(run):
        found["Hold-out"].insert(0, panel("Trained against held out", draw_drift, changes, size=WIDE))
    found["Gold"] += [panel("Gold against proxy", draw_scatter, run)] if run.has("gold/match") else []
    return found


def curve_panels(run: RunHistory, titles: Mapping[str, Lines]) -> list[Panel]:
    shown = {title: lines for title, lines in titles.items() if any(map(run.measured, lines))}
    sizes = {"Reward": WIDE}
    return [panel(title, draw_curves, run, lines, size=sizes.get(title, SMALL)) for title, lines in shown.items()]


def phase_seconds(run: RunHistory) -> dict[str, np.ndarray]:
    """Seconds (N,) of each phase that took time; `other` is the remainder of time/total."""
    phases = {name: column(run.train, f"time/{name}") for name in PHASES}
    phases = {name: np.nan_to_num(values) for name, values in phases.items() if np.nansum(values) > 0}
    rest = np.nan_to_num(column(run.train, "time/total")) - sum(phases.values())
    return phases | ({"other": rest.clip(min=0)} if phases and rest.max() > 0 else {})


def panel(title: str, draw: Callable[..., None], *args: Any, size: tuple[float, float] = SMALL) -> Panel:
    """One plot, drawn by `draw(axes, *args)`, with its title and caption."""
    with matplotlib.rc_context({"svg.hashsalt": title}, STYLE):  # ids: reproducible, and unique per panel
        figure, buffer = Figure(figsize=size, layout="constrained"), io.StringIO()
        axes = figure.subplots()
        axes.set_xlabel("iteration")
        draw(axes, *args)
        figure.savefig(buffer, format="svg")
    svg, words = inline_svg(buffer.getvalue(), title), WORDS.get(title, WORDS["Score"])
    return {"title": title, "svg": svg, "words": words, "wide": size == WIDE}


def draw_curves(ax: Axes, run: RunHistory, lines: Lines) -> None:
    """Draw metrics from training and, with standard errors, from validation; a dashed reference line."""
    steps, known = column(run.train, "step"), references(run)
    for key, (color, label) in lines.items():
        values = column(run.train, key)
        if key == "reward/total" and len(steps) > 1:
            std = column(run.train, "reward/std")
            ax.fill_between(steps, values - std, values + std, color=BLUE, alpha=0.12, lw=0, label="std of the batch")
        if run.has(key):
            draw_curve(ax, steps, values, COLORS[color], label)
        values = column(run.validations, key)
        if np.isfinite(values).any():
            error = np.nan_to_num(column(run.validations, f"{key}_stderr"))
            style = {"color": ORANGE, "ms": 4, "capsize": 2, "lw": 1.2, "zorder": 3, "label": "validation"}
            ax.errorbar(column(run.validations, "step"), values, error, fmt="o-", **style)
        if key in known:
            ax.axhline(known[key][1], ls="--", lw=1, color=GREY, label=known[key][0])
    finish(ax, lines)


def draw_curve(ax: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str) -> None:
    """Draw the finite points as a line; if there are many, faint, under a running mean over a twentieth of them."""
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    if len(y) < MANY or color == PURPLE:
        ax.plot(x, y, "o-" if len(y) < MANY else "-", ms=3, color=color, label=label)
        return
    window = np.ones(2 * (len(y) // MANY) + 1)
    mean = np.convolve(y, window, "same") / np.convolve(np.ones_like(y), window, "same")
    ax.plot(x, y, color=color, lw=0.8, alpha=0.35)
    ax.plot(x, mean, color=color, label=label)


def references(run: RunHistory) -> dict[str, tuple[str, float]]:
    """Metric -> label and value of its attainable limit."""
    perfect, floor = run.head.get("perfect") or {}, run.head.get("vae_floor") or {}
    known = {f"reward/{name}": ("perfect clips", as_float(value, name)) for name, value in perfect.items()}
    known |= {f"gold/{name}": ("VAE alone", as_float(value, name)) for name, value in floor.items()}
    return {key: reference for key, reference in known.items() if np.isfinite(reference[1])}


def finish(ax: Axes, lines: Lines) -> None:
    """Use a log axis if the metric asks for one and its values allow it; add a legend if needed."""
    if LOGARITHMIC & lines.keys() and any((np.asarray(line.get_ydata()) > 0).any() for line in ax.lines):
        ax.set_yscale("log", nonpositive="mask")
    if len(ax.get_legend_handles_labels()[1]) > 1:
        ax.legend()


def draw_schedule(ax: Axes, schedule: Mapping[str, list[float | None]], lines: Lines) -> None:
    for key, (color, label) in lines.items():
        ax.plot(numbers(schedule.get(key), key), "o-", ms=2.5, color=COLORS[color], label=label)
    ax.set_xlabel("denoising step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    finish(ax, lines)


def draw_scatter(ax: Axes, run: RunHistory) -> None:
    steps, reward, gold = (column(run.train, key) for key in ("step", "reward/total", "gold/match"))
    dots = ax.scatter(reward, gold, c=steps, s=12, linewidths=0)
    ax.figure.colorbar(dots, ax=ax, label="iteration").outline.set_visible(False)
    ax.set(xlabel="reward in training", ylabel="gold/match")


def draw_drift(ax: Axes, changes: Mapping[str, Mapping[int, Interval]]) -> None:
    for (name, moved), color in zip(changes.items(), (BLUE, ORANGE), strict=True):
        means, halves = ([getattr(value, part) for value in moved.values()] for part in ("mean", "half"))
        ax.errorbar(list(moved), means, np.nan_to_num(halves), fmt="o-", color=color, ms=4, capsize=2, label=name)
    ax.axhline(0, ls="--", lw=1, color=GREY)
    ax.legend()


def draw_map(ax: Axes, run: RunHistory, key: str) -> None:
    """Draw a metric by iteration and denoising step; gray where a step was not trained."""
    grid = np.ma.masked_invalid(run.grid(key).T)
    norm, colors = map_scale(key, grid.compressed())
    extent = (run.train[0]["step"] - 0.5, run.train[-1]["step"] + 0.5, len(grid) - 0.5, -0.5)
    picture = ax.imshow(grid, colors, norm, aspect="auto", extent=extent, interpolation="none")
    ax.set(facecolor=MASKED, ylabel="denoising step")
    ax.grid(False)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.figure.colorbar(picture, ax=ax, pad=0.02).outline.set_visible(False)


def map_scale(key: str, values: np.ndarray) -> tuple[Normalize, str]:
    """Scale and color map of a heat map; `values` are its finite cells."""
    if key == "clip_fraction":
        return Normalize(0, 1), "Blues"
    if key == "log_ratio_mean":
        reach = np.abs(values).max() or 1.0
        return SymLogNorm(reach / 100, vmin=-reach, vmax=reach), "RdBu_r"
    positive = values[values > 0]
    varied = len(positive) and positive.min() < positive.max()
    return LogNorm(positive.min(), positive.max()) if varied else Normalize(), "viridis"


def draw_stack(ax: Axes, run: RunHistory, layers: Mapping[str, np.ndarray]) -> None:
    """Draw stacked seconds, phase -> (N,); the legend has their means and shares."""
    whole = sum(values.sum() for values in layers.values())
    labels = [f"{name} {values.mean():.3g} s, {values.sum() / whole:.0%}" for name, values in layers.items()]
    colors = [PHASES.get(name, MASKED) for name in layers]
    ax.stackplot(column(run.train, "step"), *layers.values(), colors=colors, labels=labels, lw=0)
    ax.figure.legend(loc="outside right center", reverse=True)
    ax.set_ylabel("seconds")
    ax.margins(x=0)
