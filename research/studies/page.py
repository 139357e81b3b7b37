"""Builds the figures and tables of a page of results: by default research/studies/first_edition.md, from
research/studies/records/first.jsonl.

    python -m research.studies.page                                     after research/studies/ablate.py has added results
    python -m research.studies.page --results FILE.jsonl --page FILE.md        for a trial

Draws the figures figures/PAGE_STUDY.png that the page shows, including the paper's Figures 3, 4, 7, 8 and 9, and
regenerates the tables between markers in it; a missing page is created with everything available. Above are the
differences of the tables with their 95 % intervals, filled where they are decided; below, means over seeds: lines are
running means of training, dots are validation.
"""

import argparse
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from research.studies.questions import HERE, RECIPE, RECORDS, SDES, STUDIES, Study, StudyPlan
from research.studies.records import (
    VALIDATED,
    Record,
    curve,
    mean,
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

CURVES = {"reward/total": "reward", "reward/group_std": "exploration: reward std inside a group",
          "gold/match": "gold match", "gold/distance": "distance to the manifold"}  # fmt: skip
HELD = {
    "reward/total": "reward",
    "gold/match": "gold match",
    "kl/anchor": "KL to the anchor",
    "kl/coef": "KL coefficient",
}
LOGARITHMIC = ("kl/anchor", "kl/coef")
VARIABLES = {
    "balancing": "equalizer",
    "strategies": "KL strategy",
    "sde": "SDE",
    "energy": "SDE",
}  # in legends
WINDOW = 5  # points in a running mean
SIZE = (3.3, 2.5)  # inches per panel
FOREST = (0.75, 0.21)  # inches: height of a panel with differences, without rows and per row
COLUMNS = 7  # of a legend below all panels
APART = 0.012  # fraction of the horizontal axis between the dots of two arms
Draw = Callable[..., None]


def smooth(values: np.ndarray) -> np.ndarray:
    """Running mean over WINDOW points, shorter at the ends; missing values are ignored."""
    there, window = np.isfinite(values), np.ones(min(WINDOW, len(values)))
    sums, counts = (
        np.convolve(v, window, "same") for v in (np.where(there, values, 0.0), there.astype(float))
    )
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def draw_arms(ax: Axes, arms: Arms, key: str, colors: Mapping[str, str] | None = None) -> None:
    """One color per arm, with dots side by side so that none hides another."""
    colors = colors or colors_of({arm: arm for arm in arms})
    for i, (arm, records) in enumerate(arms.items()):
        draw_arm(ax, list(records.values()), key, colors[arm], arm, i - (len(arms) - 1) / 2)


def draw_arm(
    ax: Axes, records: Sequence[Record], key: str, color: str, label: str, place: float = 0.0
) -> None:
    """Mean over seeds of a smoothed curve, up to the shortest run; validation as dots."""
    if not records:
        return
    length = min(len(record["steps"]) for record in records)
    steps = records[0]["steps"][:length]
    ax.plot(
        steps,
        over_seeds([smooth(curve(record, key))[:length] for record in records]),
        color=color,
        label=label,
    )
    whole = [
        record["validation"]
        for record in records
        if not math.isnan(validated(record, "reward/total"))
    ]
    if key in VALIDATED and whole:
        at = np.array(whole[0]["step"]) + place * APART * steps[-1]
        middle = over_seeds([np.array(validation[key], dtype=float) for validation in whole])
        ax.plot(at, middle, "o", ms=4, color=color, zorder=3)


def over_seeds(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Means over rows of equal length; missing values are ignored."""
    return np.array([mean(column) for column in np.array(rows).T])


def forest(
    ax: Axes, rows: Mapping[str, Interval], colors: Mapping[str, str], decided: Collection[str]
) -> None:
    """Differences with their 95 % intervals, one row per name, the first on top; filled where decided."""
    for place, (name, change) in enumerate(rows.items()):
        inside = colors[name] if name in decided else "white"
        style = {
            "fmt": "o",
            "ms": 4.5,
            "capsize": 2.5,
            "color": colors[name],
            "markerfacecolor": inside,
        }
        ax.errorbar(change.mean, place, xerr=np.nan_to_num(change.half), **style)
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

    named: colors of some arms, if those of the study are no automatic ones; the other arms are grey then.
    """
    found = compared(study, arms)
    same = len({study.reference(arm) for arm in found}) == 1
    names = {arm: arm if same else f"{arm} minus {study.reference(arm)}" for arm in found}
    colors = colors_of({arm: arm for arm in arms}, {arm: arm.removesuffix(" off") for arm in found})
    colors = {arm: named.get(arm, GREY) if named else colors[arm] for arm in found}
    for ax, measure in zip(axes, (name for name, m in MEASURES.items() if m.better), strict=True):
        rows = {names[arm]: differences[measure].of for arm, differences in found.items()}
        decided = {names[arm] for arm, differences in found.items() if differences[measure].verdict}
        forest(ax, rows, {names[arm]: colors[arm] for arm in found}, decided)
        better = "higher" if MEASURES[measure].better > 0 else "lower"
        ax.set_title(f"{measure}, {better} is better")
        ax.set_xlabel(f"minus {study.reference(next(iter(found)))}" if same else "difference")
        ax.tick_params(labelleft=ax is axes[0])


def finish(axes: np.ndarray, title: str, below: bool = False) -> None:
    """Add a legend with the variable's name in the first panel or below all."""
    first = axes.flat[0]
    handles, labels = first.get_legend_handles_labels()
    if handles and below:
        place = {"loc": "outside lower center", "ncols": min(len(labels), COLUMNS), "fontsize": 8}
        first.figure.legend(handles, labels, title=title, **place)
    elif handles:
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
    for ax, word, title in zip(
        axes.flat, (" off", ""), ("without the equalizer", "with the equalizer"), strict=True
    ):
        for name, color in colors_of({name: name for name in SDES}).items():
            records = list(arms[f"{name}{word}"].values())
            if not records:
                continue
            schedule = schedule_of(records[0]["config"])
            measured = np.array(
                [[math.nan if v is None else v for v in r["per_step"]["grad_v"]] for r in records]
            )
            measured = np.array([mean(column) for column in measured.T])
            factor = equalizer(schedule, enabled=not word).numpy()
            noisy = schedule.stochastic.numpy()
            predicted = (factor * gradient_scale(schedule).numpy())[noisy]
            scale = np.exp(mean(np.log(measured[noisy]) - np.log(predicted)))
            sigma = schedule.sigmas[:-1].numpy()[noisy]
            ax.plot(sigma, scale * predicted, lw=1, color=color)
            ax.plot(sigma, measured[noisy], "o", ms=4, color=color, label=name)
        ax.set(title=title, xlabel="noise level sigma of the step", yscale="log")
    axes.flat[0].set_ylabel("norm of dL/dv")
    finish(axes, "SDE: dots measured, lines |b|/std")


def draw_schedules(axes: np.ndarray, arms: Arms, variable: str) -> None:
    """Figure 7: VQ, MQ, TA and the coefficient under three schedules, at the published scale and at one that acts."""
    keys = {"reward/VQ": "VQ", "reward/MQ": "MQ", "reward/TA": "TA", "kl/coef": "KL coefficient"}
    for row, names in zip(axes, (list(arms)[:3], list(arms)[3:]), strict=True):
        for ax, (key, title) in zip(row, keys.items(), strict=True):
            draw_arms(
                ax, {arm: arms[arm] for arm in names}, key, colors_of({arm: arm for arm in arms})
            )
            ax.set(title=title, xlabel="iteration")
        finish(row, variable)


Figures = Mapping[str, tuple[tuple[int, int], Draw, Mapping[str, str]]]
FIGURES: Figures = {  # study -> rows and columns, draw function, colors other than automatic ones; others: draw_curves
    "balancing": ((3, 5), draw_balancing, {}),
    "feedback": ((1, 4), partial(draw_curves, curves=HELD), {}),
    "schedules": ((2, 4), draw_schedules, {}),
}


def draw(path: Path, shape: tuple[int, int], plot: Callable[[np.ndarray], None], share: bool | str = False,
         rows: int = 0, differences: Callable[[Sequence[Axes]], None] | None = None) -> None:  # fmt: skip
    """A grid of panels, under a row of panels with that many `differences`; `share` is matplotlib's `sharey`."""
    with matplotlib.rc_context({"axes.titlesize": 9, "legend.fontsize": 7}, STYLE):
        heights = [FOREST[0] + FOREST[1] * rows] * (differences is not None) + [SIZE[1] * shape[0]]
        figure = Figure(
            figsize=(SIZE[0] * max(shape[1], 4 * bool(rows)), sum(heights)), layout="constrained"
        )
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        if differences:
            differences(parts[0].subplots(1, 4, sharey=True))
        plot(parts[-1].subplots(*shape, squeeze=False, sharey=share))
        figure.savefig(path, dpi=110, metadata={"Software": None})


def ordered(arms: Arms) -> Arms:
    """Arms that are numbers by their value; others as they are."""
    numeric = all(arm.replace(".", "", 1).replace("e-", "", 1).isdigit() for arm in arms)
    return {arm: arms[arm] for arm in sorted(arms, key=float)} if numeric else arms


def variable_of(name: str, study: Study) -> str:
    """The flag that the arms vary, or the name of a study that varies several."""
    flags = {flag for arm in study.arms.values() for flag in arm}
    return VARIABLES.get(name) or (flags.pop() if len(flags) == 1 else name.replace("_", " "))


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
    found: Mapping[str, Record],
    figures: Figures = FIGURES,
) -> dict[str, tuple[Any, ...]]:
    """Arguments of `draw`, by name: a figure per study with results, Figure 4 as `gradients`, Figure 9 as `std`."""
    made: dict[str, tuple[Any, ...]] = {}
    for name, study in studies.items():
        arms = arms_of(plan, name, study, found)
        if not comparable(arms) or name == "table2":
            continue
        found_arms = arms
        arms = ordered(paired(arms))
        shape, plot, colors = figures.get(name, ((1, 4), draw_curves, {}))
        curves = partial(plot, arms=arms, variable=variable_of(name, study))
        above = partial(draw_differences, study=study, arms=ordered(found_arms), named=colors)
        made[name] = (
            shape,
            curves,
            "row" if name == "balancing" else False,
            len(compared(study, found_arms)),
            above,
        )
        if name == "balancing":
            made["gradients"] = ((1, 2), partial(draw_gradients, arms=arms))
    made["std"] = ((1, 3), lambda axes: plot_std(list(axes.flat)))
    return made


def main(
    arguments: Sequence[str] | None = None,
    studies: Mapping[str, Study] = STUDIES,
    figures: Figures = FIGURES,
    more: Mapping[str, Table] = NO_MORE,
) -> int:
    """figures, more: of some studies, instead of the curves and after the tables that all have."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RECORDS / "first.jsonl")
    parser.add_argument("--page", type=Path, default=HERE / "first_edition.md")
    parser.add_argument(
        "--recipe", type=Path, default=RECIPE, help="YAML file that the studies vary"
    )
    args = parser.parse_args(arguments)
    try:
        plan, found = StudyPlan(recipe=args.recipe, studies=studies), read_all(args.results)
    except (ValueError, FileNotFoundError) as error:
        print(f"page.py: {error}", file=sys.stderr)
        return 2
    if unknown := sorted(
        f"{r['study']}-{r['arm']}-{r['seed']}" for key, r in found.items() if key not in plan.runs
    ):
        print(
            f"page.py: {len(unknown)} results are of no study any more, such as {unknown[0]}",
            file=sys.stderr,
        )
        return 2
    folder = args.page.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    made, drawn = tables(plan, studies, found, more), drawings(plan, studies, found, figures)
    links = {name: f"figures/{args.page.stem}_{name}.png" for name in drawn}
    page = (
        args.page.read_text(encoding="utf-8")
        if args.page.is_file()
        else first_page(studies, made, links)
    )
    for name in (name for name in drawn if links[name] in page):
        draw(args.page.parent / links[name], *drawn[name])
        print("wrote", args.page.parent / links[name])
    args.page.write_text(refreshed(page, made), encoding="utf-8")
    print("wrote", args.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
