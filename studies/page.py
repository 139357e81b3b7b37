"""Builds the figures and tables of studies/results.md, using only the files in studies/results/.

    python -m studies.page                                     after studies/ablate.py has added results
    python -m studies.page --results DIR --page FILE.md        for a trial

Draws the figures studies/figures/results_STUDY.png that the page shows, including the paper's Figures 3, 4, 7, 8 and 9,
and regenerates the tables between markers in it; a missing page is created with everything available. Lines are running
means of training, dots are validation; bands and bars are 95 % intervals over seeds. Bands of three seeds may extend
beyond their panel.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from sage_grpo.algo.equalizer import equalizer, gradient_scale
from sage_grpo.intervals import interval
from sage_grpo.tools.report_figures import BLUE, GREEN, GREY, ORANGE, PURPLE, STYLE
from studies.questions import RECIPE, ROOT, SDES, STUDIES, Study, StudyPlan
from studies.records import VALIDATED, Record, curve, mean, read_all, schedule_of, validated
from studies.result_tables import Arms, arms_of, comparable, first_page, refreshed, tables
from studies.sde_study import plot_std

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, "#b4433a", GREY, "#c9b458", "#1f2933")
CURVES = {"reward/total": "reward", "reward/group_std": "exploration: reward std inside a group",
          "gold/match": "gold match", "gold/distance": "distance to the manifold"}  # fmt: skip
HELD = {
    "reward/total": "reward",
    "gold/match": "gold match",
    "kl/anchor": "KL to the anchor",
    "kl/coef": "KL coefficient",
}
LOGARITHMIC = ("kl/anchor", "kl/coef")
WINDOW = 5  # points in a running mean
SIZE = (3.3, 2.5)  # inches per panel
APART = 0.012  # fraction of the horizontal axis between the dots of two arms
MARGIN = 0.15  # fraction of a panel's height, above and below
Draw = Callable[..., None]


def smooth(values: np.ndarray) -> np.ndarray:
    """Running mean over WINDOW points, shorter at the ends; missing values are ignored."""
    there, window = np.isfinite(values), np.ones(min(WINDOW, len(values)))
    sums, counts = (np.convolve(v, window, "same") for v in (np.where(there, values, 0.0), there.astype(float)))
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def bands(ax: Axes, arms: Arms, key: str) -> None:
    """One color per arm, with dots side by side so that none hides another."""
    for i, ((arm, records), colour) in enumerate(zip(arms.items(), COLOURS, strict=False)):
        band(ax, list(records.values()), key, colour, arm, i - (len(arms) - 1) / 2)


def band(ax: Axes, records: Sequence[Record], key: str, colour: str, label: str, place: float = 0.0) -> None:
    """Mean over seeds of a smoothed curve with its interval, up to the shortest run; validation as dots with bars."""
    if not records:
        return
    length = min(len(record["steps"]) for record in records)
    steps = records[0]["steps"][:length]
    middle, half = over_seeds([smooth(curve(record, key))[:length] for record in records])
    ax.plot(steps, middle, color=colour, label=label)
    faint = 0.15 if len(records) > 3 else 0.06
    ax.fill_between(steps, middle - half, middle + half, color=colour, alpha=faint, lw=0)
    whole = [record["validation"] for record in records if not math.isnan(validated(record, "reward/total"))]
    if key in VALIDATED and whole:
        middle, half = over_seeds([np.array(validation[key], dtype=float) for validation in whole])
        style = {"fmt": "o", "ms": 4, "capsize": 2, "lw": 1.2, "color": colour, "zorder": 3}
        at = np.array(whole[0]["step"]) + place * APART * steps[-1]
        ax.errorbar(at, middle, np.nan_to_num(half), **style)


def over_seeds(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Means and interval half-widths over rows of equal length."""
    found = [interval(column) for column in np.array(rows).T]
    return np.array([point.mean for point in found]), np.array([point.half for point in found])


def finish(axes: np.ndarray, title: str | None = None, below: bool = False) -> None:
    """Add a legend in the first panel or below all; panel height follows lines and bars, not bands."""
    for ax in axes.flat:
        together = ax.get_shared_y_axes().get_siblings(ax)
        values = np.concatenate([heights(other) for other in together])
        if ax.get_yscale() == "linear" and len(values) and np.ptp(values):
            margin, (bottom, top) = MARGIN * np.ptp(values), ax.get_ylim()
            ax.set_ylim(max(bottom, values.min() - margin), min(top, values.max() + margin))
    first = axes.flat[0]
    handles, labels = first.get_legend_handles_labels()
    if handles and below:
        first.figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    elif handles:
        first.legend(title=title)


def heights(ax: Axes) -> np.ndarray:
    """All values of a panel's lines and bars."""
    lines = [np.asarray(line.get_ydata(), dtype=float) for line in ax.lines]
    bars = [
        segment[:, 1] for part in ax.collections if isinstance(part, LineCollection) for segment in part.get_segments()
    ]
    values = np.concatenate([*lines, *bars, []])
    return values[np.isfinite(values)]


def draw_curves(axes: np.ndarray, arms: Arms, curves: Mapping[str, str] = CURVES) -> None:
    """Reward, exploration and gold in training, or other curves, one color per arm."""
    for ax, (key, title) in zip(axes.flat, curves.items(), strict=True):
        bands(ax, arms, key)
        ax.set(title=title, xlabel="iteration", yscale="log" if key in LOGARITHMIC else "linear")
    finish(axes, below=True)


def draw_balancing(axes: np.ndarray, arms: Arms) -> None:
    """Figure 3: with and without the equalizer, one column per SDE; reward, then the gold metrics."""
    for row, key in zip(axes, ("reward/total", "gold/match", "gold/distance"), strict=True):
        for ax, name in zip(row, SDES, strict=True):
            bands(ax, {"with": arms[name], "without": arms[f"{name} off"]}, key)
            ax.set(title=name if key == "reward/total" else "", xlabel="iteration")
        row[0].set_ylabel(CURVES[key])
    finish(axes, "equalizer")


def draw_gradients(axes: np.ndarray, arms: Arms) -> None:
    """Figure 4: measured norm of dL/dv by noise level, and |b|/std of the sampler scaled to it, without and with S."""
    for ax, word, title in zip(axes.flat, (" off", ""), ("without the equalizer", "with the equalizer"), strict=True):
        for name, colour in zip(SDES, COLOURS, strict=False):
            records = list(arms[f"{name}{word}"].values())
            if not records:
                continue
            schedule = schedule_of(records[0]["config"])
            measured = np.array([[math.nan if v is None else v for v in r["per_step"]["grad_v"]] for r in records])
            measured = np.array([mean(column) for column in measured.T])
            factor = equalizer(schedule, enabled=not word).numpy()
            noisy = schedule.stochastic.numpy()
            predicted = (factor * gradient_scale(schedule).numpy())[noisy]
            scale = np.exp(mean(np.log(measured[noisy]) - np.log(predicted)))
            sigma = schedule.sigmas[:-1].numpy()[noisy]
            ax.plot(sigma, scale * predicted, lw=1, color=colour)
            ax.plot(sigma, measured[noisy], "o", ms=4, color=colour, label=name)
        ax.set(title=title, xlabel="noise level sigma of the step", yscale="log")
    axes.flat[0].set_ylabel("norm of dL/dv")
    finish(axes, "dots measured, lines |b|/std")


def draw_schedules(axes: np.ndarray, arms: Arms) -> None:
    """Figure 7: VQ, MQ, TA and the coefficient under three schedules, at the published scale and at one that acts."""
    keys = {"reward/VQ": "VQ", "reward/MQ": "MQ", "reward/TA": "TA", "kl/coef": "KL coefficient"}
    for row, names in zip(axes, (list(arms)[:3], list(arms)[3:]), strict=True):
        for ax, (key, title) in zip(row, keys.items(), strict=True):
            bands(ax, {arm: arms[arm] for arm in names}, key)
            ax.set(title=title, xlabel="iteration")
        finish(row)


FIGURES: dict[str, tuple[tuple[int, int], Draw]] = {  # study -> rows and columns, draw function; others: draw_curves
    "balancing": ((3, 5), draw_balancing),
    "feedback": ((1, 4), partial(draw_curves, curves=HELD)),
    "schedules": ((2, 4), draw_schedules),
}


def draw(path: Path, shape: tuple[int, int], plot: Callable[[np.ndarray], None], share: bool | str = False) -> None:
    """A figure with a grid of panels; `share` is matplotlib's `sharey`."""
    with matplotlib.rc_context({"axes.titlesize": 9, "legend.fontsize": 7}, STYLE):
        figure = Figure(figsize=(SIZE[0] * shape[1], SIZE[1] * shape[0]), layout="constrained")
        plot(figure.subplots(*shape, squeeze=False, sharey=share))
        figure.savefig(path, dpi=110, metadata={"Software": None})


def paired(arms: Arms) -> Arms:
    """Restrict to the seeds that all arms with results share, so that curves differ only by arm."""
    shared = set.intersection(*(set(records) for records in arms.values() if records))
    return {arm: {seed: record for seed, record in records.items() if seed in shared} for arm, records in arms.items()}


def drawings(plan: StudyPlan, studies: Mapping[str, Study], found: Mapping[str, Record]) -> dict[str, tuple[Any, ...]]:
    """Arguments of `draw`, by name: a figure per study with results, Figure 4 as `gradients`, Figure 9 as `std`."""
    made: dict[str, tuple[Any, ...]] = {}
    for name, study in studies.items():
        arms = arms_of(plan, name, study, found)
        if not comparable(arms) or name == "table2":
            continue
        arms = paired(arms)
        shape, plot = FIGURES.get(name, ((1, 4), draw_curves))
        made[name] = (shape, partial(plot, arms=arms), "row" if name == "balancing" else False)
        if name == "balancing":
            made["gradients"] = ((1, 2), partial(draw_gradients, arms=arms))
    made["std"] = ((1, 3), lambda axes: plot_std(list(axes.flat)))
    return made


def main(arguments: Sequence[str] | None = None, studies: Mapping[str, Study] = STUDIES) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "studies" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "studies" / "results.md")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="YAML file that the studies vary")
    args = parser.parse_args(arguments)
    try:
        plan, found = StudyPlan(recipe=args.recipe, studies=studies), read_all(args.results)
    except (ValueError, FileNotFoundError) as error:
        print(f"page.py: {error}", file=sys.stderr)
        return 2
    if unknown := sorted(f"{r['study']}-{r['arm']}-{r['seed']}" for key, r in found.items() if key not in plan.runs):
        print(f"page.py: {len(unknown)} results are of no study any more, such as {unknown[0]}", file=sys.stderr)
        return 2
    folder = args.page.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    made, drawn = tables(plan, studies, found), drawings(plan, studies, found)
    links = {name: f"figures/results_{name}.png" for name in drawn}
    page = args.page.read_text(encoding="utf-8") if args.page.is_file() else first_page(studies, made, links)
    for name in (name for name in drawn if links[name] in page):
        draw(args.page.parent / links[name], *drawn[name])
        print("wrote", args.page.parent / links[name])
    args.page.write_text(refreshed(page, made), encoding="utf-8")
    print("wrote", args.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
