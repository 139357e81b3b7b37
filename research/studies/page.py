"""Build the figures and tables of a page of results: by default research/studies/first_edition.md, from
research/studies/records/first.jsonl.

    python -m research.studies.page                                        after research/studies/ablate.py has added
                                                                           results
    python -m research.studies.page --results FILE.jsonl --page FILE.md    for a trial

Draws the figures figures/PAGE_STUDY.png that the page shows, including the paper's Figures 3, 4, 7, 8 and 9, and
regenerates the tables between markers in it; a missing page is created with everything available. Above are the
differences of the tables with their 95 % intervals, filled where they are decided; below, means over seeds: lines are
running means of training, dots are validation.
"""

import argparse
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from research.studies.questions import HERE, RECIPE, RECORDS, SDES, STUDIES, Study, StudyPlan
from research.studies.records import (
    VALIDATED,
    Record,
    as_float,
    curve,
    mean,
    name_of,
    read_all,
    schedule_of,
    validated,
)
from research.studies.result_tables import (
    MEASURES,
    NO_MORE,
    Arms,
    Table,
    arms_of,
    comparable,
    compared,
    first_page,
    refreshed,
    tables,
)
from research.studies.sde_study import plot_std
from sage_grpo.algo.equalizer import equalizer, gradient_scale
from sage_grpo.intervals import Interval
from sage_grpo.tools.figure_style import GREY, STYLE, colors_of

CURVES = {
    "reward/total": "reward",
    "reward/group_std": "exploration: reward std inside a group",
    "gold/match": "gold match",
    "gold/distance": "distance to the manifold",
}
KL_CURVES = {
    "reward/total": "reward",
    "gold/match": "gold match",
    "kl/anchor": "KL to the anchor",
    "kl/coef": "KL coefficient",
}
LOGARITHMIC = ("kl/anchor", "kl/coef")
VARIABLES = {  # in legends
    "balancing": "equalizer",
    "strategies": "KL strategy",
    "sde": "SDE",
    "energy": "SDE",
}
WINDOW = 5  # points in a running mean
PANEL_WIDTH, PANEL_HEIGHT = 3.3, 2.5  # inches
FOREST_HEIGHT, FOREST_ROW = (
    0.75,
    0.21,
)  # inches: of a panel with differences, without rows and per row
FOREST_PANELS = 4
LEGEND_COLUMNS = 7  # of a legend below all panels
APART = 0.012  # fraction of the horizontal axis between the dots of two arms

Plot = Callable[[np.ndarray], None]  # draws into the axes of a figure


@dataclass(frozen=True)
class Drawing:
    """A grid of panels, under a row of panels with differences where there are some.

    shape: rows and columns. share_y: matplotlib's `sharey`. rows: number of differences. panel_height: in inches.
    """

    shape: tuple[int, int]
    plot: Plot
    share_y: bool | str = False
    rows: int = 0
    differences: Callable[[Sequence[Axes]], None] | None = None
    panel_height: float = PANEL_HEIGHT


def smooth(values: np.ndarray) -> np.ndarray:
    """Running mean over WINDOW points, shorter at the ends; missing values are ignored."""
    known = np.isfinite(values)
    window = np.ones(min(WINDOW, len(values)))
    sums = np.convolve(np.where(known, values, 0.0), window, "same")
    counts = np.convolve(known.astype(float), window, "same")
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def draw_arms(ax: Axes, arms: Arms, key: str, colors: Mapping[str, str] | None = None) -> None:
    """One color per arm, with dots side by side so that none hides another."""
    colors = colors or colors_of({arm: arm for arm in arms})
    for i, (arm, records) in enumerate(arms.items()):
        place = i - (len(arms) - 1) / 2
        draw_arm(ax, list(records.values()), key, colors[arm], arm, place)


def draw_arm(
    ax: Axes, records: Sequence[Record], key: str, color: str, label: str, place: float = 0.0
) -> None:
    """Mean over seeds of a smoothed curve, up to the shortest run; validation as dots.

    place: how far the dots are moved sideways, in units of APART.
    """
    if not records:
        return
    length = min(len(record["steps"]) for record in records)
    steps = records[0]["steps"][:length]
    curves = [smooth(curve(record, key))[:length] for record in records]
    ax.plot(steps, over_seeds(curves), color=color, label=label)

    complete = [
        record["validation"]
        for record in records
        if not math.isnan(validated(record, "reward/total"))
    ]
    if key in VALIDATED and complete:
        x = np.array(complete[0]["step"]) + place * APART * steps[-1]
        y = over_seeds([np.array(validation[key], dtype=float) for validation in complete])
        ax.plot(x, y, "o", ms=4, color=color, zorder=3)


def over_seeds(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Means over rows of equal length; missing values are ignored."""
    return np.array([mean(column) for column in np.array(rows).T])


def forest(
    ax: Axes, rows: Mapping[str, Interval], colors: Mapping[str, str], decided: Collection[str]
) -> None:
    """Differences with their 95 % intervals, one row per name, the first on top; filled where decided."""
    for place, (name, change) in enumerate(rows.items()):
        ax.errorbar(
            change.mean,
            place,
            xerr=np.nan_to_num(change.half),
            fmt="o",
            ms=4.5,
            capsize=2.5,
            color=colors[name],
            markerfacecolor=colors[name] if name in decided else "white",
        )
    ax.axvline(0, ls="--", lw=1, color=GREY, zorder=0)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.locator_params(axis="x", nbins=5)
    ax.grid(False, axis="y")
    ax.grid(True, axis="x")


def draw_differences(
    axes: Sequence[Axes], study: Study, arms: Arms, named: Mapping[str, str]
) -> None:
    """A forest per gold metric and for the reward: each arm minus the one that it is compared with.

    named: colors of some arms, where the study does not use automatic ones; the other arms are gray then.
    """
    changes = compared(study, arms)
    references = {study.reference(arm) for arm in changes}
    same_reference = len(references) == 1
    labels = {
        arm: arm if same_reference else f"{arm} minus {study.reference(arm)}" for arm in changes
    }
    colors = colors_of(
        {arm: arm for arm in arms}, {arm: arm.removesuffix(" off") for arm in changes}
    )
    if named:
        colors = {arm: named.get(arm, GREY) for arm in changes}
    label_colors = {labels[arm]: colors[arm] for arm in changes}

    judged = [name for name, measure in MEASURES.items() if measure.better]
    for ax, name in zip(axes, judged, strict=True):
        rows = {labels[arm]: differences[name].change for arm, differences in changes.items()}
        decided = {labels[arm] for arm, differences in changes.items() if differences[name].verdict}
        forest(ax, rows, label_colors, decided)
        better = "higher" if MEASURES[name].better > 0 else "lower"
        ax.set_title(f"{name}, {better} is better")
        ax.set_xlabel(f"minus {study.reference(next(iter(changes)))}" if same_reference else "difference")  # fmt: skip
        ax.tick_params(labelleft=ax is axes[0])


def finish(axes: np.ndarray, title: str, below: bool = False) -> None:
    """Add a legend with the variable's name, in the first panel or below all."""
    first = axes.flat[0]
    handles, labels = first.get_legend_handles_labels()
    if not handles:
        return
    if below:
        columns = min(len(labels), LEGEND_COLUMNS)
        place = {"loc": "outside lower center", "ncols": columns, "fontsize": 8}
        first.figure.legend(handles, labels, title=title, **place)
    else:
        first.legend(title=title)


def draw_curves(
    axes: np.ndarray, arms: Arms, variable: str, curves: Mapping[str, str] = CURVES
) -> None:
    """Reward, exploration and gold in training, or other curves, one color per arm."""
    for ax, (key, title) in zip(axes.flat, curves.items(), strict=True):
        draw_arms(ax, arms, key)
        ax.set(title=title, xlabel="iteration", yscale="log" if key in LOGARITHMIC else "linear")
    finish(axes, variable, below=True)


def draw_balancing(axes: np.ndarray, arms: Arms, variable: str) -> None:
    """Figure 3: with and without the equalizer, one column per SDE; reward, then the gold metrics."""
    for row, key in zip(axes, ("reward/total", "gold/match", "gold/distance"), strict=True):
        for ax, name in zip(row, SDES, strict=True):
            draw_arms(ax, {"with": arms[name], "without": arms[f"{name} off"]}, key)
            ax.set(title=name if key == "reward/total" else "", xlabel="iteration")
        row[0].set_ylabel(CURVES[key])
    finish(axes, variable)


def draw_gradients(axes: np.ndarray, arms: Arms) -> None:
    """Figure 4: measured norm of dL/dv by noise level, and |b|/std of the sampler scaled to it, without and with S."""
    titles = {" off": "without the equalizer", "": "with the equalizer"}
    colors = colors_of({name: name for name in SDES})
    for ax, (suffix, title) in zip(axes.flat, titles.items(), strict=True):
        for name, color in colors.items():
            records = list(arms[f"{name}{suffix}"].values())
            if not records:
                continue
            schedule = schedule_of(records[0]["config"])
            noisy = schedule.stochastic.numpy()
            sigma = schedule.sigmas[:-1].numpy()[noisy]
            norms = [[as_float(v) for v in record["per_step"]["grad_v"]] for record in records]
            measured = over_seeds(norms)[noisy]
            factor = equalizer(schedule, enabled=not suffix).numpy()
            predicted = (factor * gradient_scale(schedule).numpy())[noisy]
            scale = np.exp(mean(np.log(measured) - np.log(predicted)))
            ax.plot(sigma, scale * predicted, lw=1, color=color)
            ax.plot(sigma, measured, "o", ms=4, color=color, label=name)
        ax.set(title=title, xlabel="noise level sigma of the step", yscale="log")
    axes.flat[0].set_ylabel("norm of dL/dv")
    finish(axes, "SDE: dots measured, lines |b|/std")


def draw_schedules(axes: np.ndarray, arms: Arms, variable: str) -> None:
    """Figure 7: VQ, MQ, TA and the coefficient under three schedules, at the published scale and at one that acts."""
    keys = {"reward/VQ": "VQ", "reward/MQ": "MQ", "reward/TA": "TA", "kl/coef": "KL coefficient"}
    colors = colors_of({arm: arm for arm in arms})
    published, acting = list(arms)[:3], list(arms)[3:]
    for row, names in zip(axes, (published, acting), strict=True):
        for ax, (key, title) in zip(row, keys.items(), strict=True):
            draw_arms(ax, {arm: arms[arm] for arm in names}, key, colors)
            ax.set(title=title, xlabel="iteration")
        finish(row, variable)


@dataclass(frozen=True)
class StudyFigure:
    """How the results of a study are drawn below its differences.

    plot: called with axes, arms and the variable's name. shape: rows and columns.
    colors: of arms, instead of automatic ones. panel_height: in inches.
    """

    plot: Callable[..., None] = draw_curves
    shape: tuple[int, int] = (1, 4)
    share_y: bool | str = False
    colors: Mapping[str, str] = field(default_factory=dict)
    panel_height: float = PANEL_HEIGHT


FIGURES: Mapping[str, StudyFigure] = {  # of the studies that are not drawn by draw_curves
    "balancing": StudyFigure(draw_balancing, (3, 5), share_y="row"),
    "feedback": StudyFigure(partial(draw_curves, curves=KL_CURVES)),
    "schedules": StudyFigure(draw_schedules, (2, 4)),
}


def draw(path: Path, drawing: Drawing) -> None:
    """Draw a figure and save it."""
    rows, columns = drawing.shape
    heights = [drawing.panel_height * rows]
    if drawing.differences:
        heights.insert(0, FOREST_HEIGHT + FOREST_ROW * drawing.rows)
        columns = max(columns, FOREST_PANELS if drawing.rows else 0)
    with matplotlib.rc_context({"axes.titlesize": 9, "legend.fontsize": 7}, STYLE):
        figure = Figure(figsize=(PANEL_WIDTH * columns, sum(heights)), layout="constrained")
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        if drawing.differences:
            drawing.differences(parts[0].subplots(1, FOREST_PANELS, sharey=True))
        drawing.plot(parts[-1].subplots(*drawing.shape, squeeze=False, sharey=drawing.share_y))
        figure.savefig(path, dpi=110, metadata={"Software": None})


def ordered(arms: Arms) -> Arms:
    """Arms that are numbers by their value; others as they are."""
    numeric = all(arm.replace(".", "", 1).replace("e-", "", 1).isdigit() for arm in arms)
    return {arm: arms[arm] for arm in sorted(arms, key=float)} if numeric else arms


def variable_of(name: str, study: Study) -> str:
    """The flag that the arms vary, or the name of a study that varies several."""
    flags = {flag for arm in study.arms.values() for flag in arm}
    if name in VARIABLES:
        return VARIABLES[name]
    return flags.pop() if len(flags) == 1 else name.replace("_", " ")


def paired(arms: Arms) -> Arms:
    """Restrict to the seeds that all arms with results share, so that curves differ only by arm."""
    shared = set.intersection(*(set(records) for records in arms.values() if records))
    return {
        arm: {seed: record for seed, record in records.items() if seed in shared}
        for arm, records in arms.items()
    }


def drawings(
    plan: StudyPlan,
    studies: Mapping[str, Study],
    runs: Mapping[str, Record],
    figures: Mapping[str, StudyFigure] = FIGURES,
) -> dict[str, Drawing]:
    """By name, a figure per study with results, Figure 4 as `gradients`, Figure 9 as `std`."""
    made: dict[str, Drawing] = {}
    for name, study in studies.items():
        arms = arms_of(plan, name, study, runs)
        if not comparable(arms) or name == "table2":
            continue
        figure = figures.get(name, StudyFigure())
        shared_arms = ordered(paired(arms))
        made[name] = Drawing(
            figure.shape,
            partial(figure.plot, arms=shared_arms, variable=variable_of(name, study)),
            figure.share_y,
            rows=len(compared(study, arms)),
            differences=partial(
                draw_differences, study=study, arms=ordered(arms), named=figure.colors
            ),
            panel_height=figure.panel_height,
        )
        if name == "balancing":
            made["gradients"] = Drawing((1, 2), partial(draw_gradients, arms=shared_arms))
    made["std"] = Drawing((1, 3), lambda axes: plot_std(list(axes.flat)))
    return made


def main(
    arguments: Sequence[str] | None = None,
    studies: Mapping[str, Study] = STUDIES,
    figures: Mapping[str, StudyFigure] = FIGURES,
    more: Mapping[str, Table] = NO_MORE,
) -> int:
    """figures: of studies that are not drawn as curves; more: tables besides those that every study has."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--results", type=Path, default=RECORDS / "first.jsonl", help="file of finished runs")
    add("--page", type=Path, default=HERE / "first_edition.md", help="page to write")
    add("--recipe", type=Path, default=RECIPE, help="YAML file that the studies vary")
    args = parser.parse_args(arguments)
    try:
        plan = StudyPlan(recipe=args.recipe, studies=studies)
        runs = read_all(args.results)
    except (ValueError, FileNotFoundError) as error:
        print(f"page.py: {error}", file=sys.stderr)
        return 2
    unknown = sorted(name_of(record) for key, record in runs.items() if key not in plan.runs)
    if unknown:
        print(
            f"page.py: {len(unknown)} results belong to no study any more, such as {unknown[0]}",
            file=sys.stderr,
        )
        return 2

    (args.page.parent / "figures").mkdir(parents=True, exist_ok=True)
    made_tables = tables(plan, studies, runs, more)
    made_drawings = drawings(plan, studies, runs, figures)
    links = {name: f"figures/{args.page.stem}_{name}.png" for name in made_drawings}
    text = first_page(studies, made_tables, links)
    if args.page.is_file():
        text = args.page.read_text(encoding="utf-8")
    for name, drawing in made_drawings.items():
        if links[name] in text:
            path = args.page.parent / links[name]
            draw(path, drawing)
            print("wrote", path)
    args.page.write_text(refreshed(text, made_tables), encoding="utf-8")
    print("wrote", args.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
