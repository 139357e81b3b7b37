"""The figures of a report and their captions. Metrics that a run did not record are left out.

Shapes: N logged iterations, T denoising steps.
"""

import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sage_grpo.intervals import Interval, student_95
from sage_grpo.runs.history import RunHistory, as_float, column, numbers
from sage_grpo.tools.figure_style import BLUE, GREEN, GREY, ORANGE, PALE, PURPLE, STYLE, YELLOW
from sage_grpo.tools.paired import drift, number
from sage_grpo.tools.templating import inline_svg

TEMPLATES = STYLE.parent
SMALL, WIDE, MAP = (3.9, 2.5), (6.0, 2.8), (4.8, 2.4)  # inches; the page scales them by 0.6 to 1.4
LONGEST = 28  # letters of a run's name in a legend: the last ones, which tell runs apart
MANY = 40  # points above which a curve is drawn with its running mean
Lines = Mapping[str, tuple[str, str]]  # metric -> color, label
Curve = tuple[
    Sequence[Mapping[str, Any]], str, str, str
]  # lines of metrics.jsonl, metric, color, label
Panel = dict[str, Any]  # title, svg, words, wide
FIGURES = json.loads(
    (TEMPLATES / "figures.json").read_text()
)  # section -> title -> lines, or the metric of a map
TITLES = {
    next(iter(d)): name
    for part in ("Reward", "Gold", "Updates")
    for name, d in FIGURES[part].items()
}
COLORS = {
    "blue": BLUE,
    "orange": ORANGE,
    "green": GREEN,
    "purple": PURPLE,
    "grey": GREY,
}  # by their names in FIGURES
EXACT = {"lr", "kl/coef"}  # set, not measured: never smoothed
LOGARITHMIC = {
    "kl/anchor",
    "kl/coef",
    "policy/grad_norm",
    "policy/ratio_max_deviation",
    "equalizer",
}
PHASES = {
    "rollout": BLUE,
    "decode": PALE,
    "reward": ORANGE,
    "gold": GREEN,
    "anchor": YELLOW,
    "update": PURPLE,
}
# what a figure shows, and what healthy looks like
WORDS = json.loads((TEMPLATES / "captions.json").read_text())


def panels(run: RunHistory) -> dict[str, list[Panel]]:
    """The figures of each section."""
    scores = {name: {f"reward/{name}": ("blue", "training")} for name in run.scores}
    maps = {
        title: key for title, key in FIGURES["Maps"].items() if np.nan_to_num(run.grid(key)).any()
    }
    schedule, phases = run.head.get("schedule"), phase_seconds(run)
    plans = FIGURES["Schedule"] if schedule else {}
    found = {
        "Reward": run_panels(run, FIGURES["Reward"] | scores),
        "Hold-out": run_panels(run, {key: {key: ("green", "")} for key in sorted(run.holdouts)}),
        "Gold": run_panels(run, FIGURES["Gold"]),
        "Trust region and updates": run_panels(run, FIGURES["Updates"]),
        "By denoising step": [
            panel(title, draw_map, run, key, size=MAP) for title, key in maps.items()
        ],
        "Schedule": [
            panel(title, draw_schedule, schedule, lines) for title, lines in plans.items()
        ],
        "Time": [panel("Time per iteration", draw_stack, run, phases, size=WIDE)] if phases else [],
    }
    if changes := drift(run):
        found["Hold-out"].insert(
            0, panel("Trained against held out", draw_drift, changes, size=WIDE)
        )
    found["Gold"] += (
        [panel("Gold against proxy", draw_scatter, run)] if run.has("gold/match") else []
    )
    return found


def run_panels(run: RunHistory, titles: Mapping[str, Lines]) -> list[Panel]:
    """The curves of one run: training, then validation, and what can be reached."""
    perfect, floor, found = run.head.get("perfect") or {}, run.head.get("vae_floor") or {}, []
    limits = {
        f"reward/{name}": ("perfect clips", as_float(value, name))
        for name, value in perfect.items()
    }
    limits |= {
        f"gold/{name}": ("VAE alone", as_float(value, name)) for name, value in floor.items()
    }
    known = {key: limit for key, limit in limits.items() if np.isfinite(limit[1])}
    for title, lines in titles.items():
        curves = [(run.train, key, COLORS[color], label) for key, (color, label) in lines.items()]
        curves += [(run.validations, key, ORANGE, "validation") for key in lines]
        found += curve_panels(title, curves, dict(known[key] for key in lines if key in known))
    return found


def overlays(runs: Mapping[str, RunHistory], colors: Mapping[str, str]) -> dict[str, list[Panel]]:
    """The curves of several runs, a panel per metric: of their `validations`, and of `train`ing."""
    labels = {name: name if len(name) <= LONGEST else f"…{name[-LONGEST:]}" for name in runs}
    lines = [line for run in runs.values() for line in run.validations]
    validated = [
        "reward/total",
        *(key for line in lines for key in line if f"{key}_stderr" in line),
    ]
    found: dict[str, list[Panel]] = {"validations": [], "train": []}
    for kind, keys in (("validations", dict.fromkeys(validated)), ("train", TITLES)):
        for key in keys:
            curves = [
                (getattr(run, kind), key, colors[name], labels[name]) for name, run in runs.items()
            ]
            found[kind] += curve_panels(TITLES.get(key, key), curves, {})
    return found


def curve_panels(title: str, curves: Sequence[Curve], known: Mapping[str, float]) -> list[Panel]:
    """One panel, whose caption says from where to where its curves went; none if all is 0 or missing."""
    shown = [curve for curve in curves if np.nan_to_num(column(*curve[:2])).any()]
    moved = "; ".join(
        f"{curve[-1]} {finding(column(*curve[:2]))}".strip() for curve in shown if len(curve[0]) > 1
    )
    size, said = (
        WIDE if title == "Total reward" else SMALL,
        f"First to last: {moved}. " if moved else "",
    )
    return [panel(title, draw_curves, shown, known, size=size, found=said)] if shown else []


def finding(values: np.ndarray) -> str:
    """From where to where a curve went, in the means of its first and last tenth."""
    finite = values[np.isfinite(values)]
    tenth = -(-len(finite) // 10)
    return " → ".join(number(float(part.mean())) for part in (finite[:tenth], finite[-tenth:]))


def phase_seconds(run: RunHistory) -> dict[str, np.ndarray]:
    """Seconds (N,) of each phase that took time; `other` is the remainder of time/total."""
    phases = {name: column(run.train, f"time/{name}") for name in PHASES}
    phases = {
        name: np.nan_to_num(values) for name, values in phases.items() if np.nansum(values) > 0
    }
    rest = np.nan_to_num(column(run.train, "time/total")) - sum(phases.values())
    return phases | ({"other": rest.clip(min=0)} if phases and rest.max() > 0 else {})


def panel(
    title: str, draw: Callable[..., None], *args: Any, size: tuple = SMALL, found: str = ""
) -> Panel:
    """One plot, drawn by `draw(axes, *args)`, with its title and caption: what was found, and what it means."""
    with matplotlib.rc_context(
        {"svg.hashsalt": title}, STYLE
    ):  # ids: reproducible, and unique per panel
        figure, buffer = Figure(figsize=size, layout="constrained"), io.StringIO()
        axes = figure.subplots()
        axes.set_xlabel("iteration")
        draw(axes, *args)
        figure.savefig(buffer, format="svg", transparent=True)
    words = WORDS.get(title, WORDS["Score"])
    return {
        "title": title,
        "svg": inline_svg(buffer.getvalue(), title),
        "words": found + words,
        "wide": size == WIDE,
    }


def draw_curves(ax: Axes, curves: Sequence[Curve], known: Mapping[str, float]) -> None:
    """Draw curves of one metric or of related ones; validations with 95 % intervals, from their standard errors."""
    for lines, key, color, label in curves:
        steps, values, errors = (column(lines, name) for name in ("step", key, f"{key}_stderr"))
        if np.isfinite(errors).any():
            factors = [
                student_95(count - 1) if count > 2 else 0.0 for count in column(lines, "count")
            ]
            style = {"fmt": "o-", "ms": 4, "capsize": 2, "lw": 1.2, "color": color, "label": label}
            ax.errorbar(steps, values, np.nan_to_num(errors * factors), **style)
        else:
            draw_curve(ax, steps, values, color, label, smooth=key not in EXACT)
    for label, value in known.items():
        ax.axhline(value, ls="--", lw=1, color=GREY, label=label)
    finish(ax, [key for _, key, _, _ in curves])


def draw_curve(
    ax: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str, smooth: bool = True
) -> None:
    """Draw the finite points as a line; if there are many, faint, under a running mean over a twentieth of them."""
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    if len(y) < MANY or not smooth:
        ax.plot(x, y, "o-" if len(y) < MANY else "-", ms=3, color=color, label=label)
        return
    window = np.ones(2 * (len(y) // MANY) + 1)
    mean = np.convolve(y, window, "same") / np.convolve(np.ones_like(y), window, "same")
    ax.plot(x, y, color=color, lw=0.8, alpha=0.35)
    ax.plot(x, mean, color=color, label=label)


def finish(ax: Axes, keys: Collection[str]) -> None:
    """Use a log axis if the metric asks for one and its values allow it; add a legend if needed."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if LOGARITHMIC & set(keys) and any(
        (np.asarray(line.get_ydata()) > 0).any() for line in ax.lines
    ):
        ax.set_yscale("log", nonpositive="mask")
    if len(ax.get_legend_handles_labels()[1]) > 1:
        ax.legend()


def draw_schedule(ax: Axes, schedule: Mapping[str, list[float | None]], lines: Lines) -> None:
    for key, (color, label) in lines.items():
        ax.plot(numbers(schedule.get(key), key), "o-", ms=2.5, color=COLORS[color], label=label)
    ax.set_xlabel("denoising step")
    finish(ax, lines)


def draw_scatter(ax: Axes, run: RunHistory) -> None:
    steps, reward, gold = (column(run.train, key) for key in ("step", "reward/total", "gold/match"))
    dots = ax.scatter(reward, gold, c=steps, s=12, linewidths=0)
    ax.figure.colorbar(dots, ax=ax, label="iteration").outline.set_visible(False)
    ax.set(xlabel="reward in training", ylabel="gold/match")


def draw_drift(ax: Axes, changes: Mapping[str, Mapping[int, Interval]]) -> None:
    for (name, moved), color in zip(changes.items(), (BLUE, ORANGE), strict=True):
        means, halves = (
            [getattr(value, part) for value in moved.values()] for part in ("mean", "half")
        )
        ax.errorbar(
            list(moved),
            means,
            np.nan_to_num(halves),
            fmt="o-",
            color=color,
            ms=4,
            capsize=2,
            label=name,
        )
    ax.axhline(0, ls="--", lw=1, color=GREY)
    ax.legend()


def draw_map(ax: Axes, run: RunHistory, key: str) -> None:
    """Draw a metric by iteration and denoising step; gray where a step was not trained."""
    grid = np.ma.masked_invalid(run.grid(key).T)
    norm, colors = map_scale(key, grid.compressed())
    extent = (run.train[0]["step"] - 0.5, run.train[-1]["step"] + 0.5, len(grid) - 0.5, -0.5)
    picture = ax.imshow(grid, colors, norm, aspect="auto", extent=extent, interpolation="none")
    ax.set(facecolor=f"{GREY}55", ylabel="denoising step")
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
    return LogNorm() if (values > 0).any() else Normalize(), "viridis"


def draw_stack(ax: Axes, run: RunHistory, layers: Mapping[str, np.ndarray]) -> None:
    """Draw stacked seconds, phase -> (N,); the legend has their means and shares."""
    whole = sum(values.sum() for values in layers.values())
    labels = [
        f"{name} {values.mean():.3g} s, {values.sum() / whole:.0%}"
        for name, values in layers.items()
    ]
    colors = [PHASES.get(name, GREY) for name in layers]
    ax.stackplot(column(run.train, "step"), *layers.values(), colors=colors, labels=labels, lw=0)
    ax.figure.legend(loc="outside right center", reverse=True)
    ax.set_ylabel("seconds")
    ax.margins(x=0)
