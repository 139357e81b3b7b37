"""Draws what training far beyond the gain does: rewards and gold against the distance from the base model.

    bash research/benchmarks/due.sh beyond OUTPUT                   four runs of 1,200 updates on one GPU
    python -m research.studies.overoptimisation --distil RUN...     keeps their measurements in
                                                                    research/studies/records/beyond.jsonl
    python -m research.studies.overoptimisation                     draws docs/figures/overoptimisation.png from these

As in the literature on overoptimisation of reward models (Gao et al., arXiv 2210.10760), the x axis is the square root
of the KL to the base model, which all of these runs have as their anchor. Curves are means over three validations.
Vertical lines show where the held-out reward of the first run was highest, and where a KL keeps a run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from research.studies import records
from research.studies.questions import RECORDS, ROOT
from sage_grpo.config.yaml_files import yaml_mapping
from sage_grpo.intervals import interval
from sage_grpo.runs.clips import read_validations
from sage_grpo.runs.history import RunError, RunHistory, column, read_run
from sage_grpo.tools.figure_style import BLUE, GREEN, GREY, ORANGE, STYLE

KEPT = RECORDS / "beyond.jsonl"
FIGURE = ROOT / "docs" / "figures" / "overoptimisation.png"
FLAGS = ("learning_rate", "kl_weight", "seed", "max_steps")
PANELS = {
    "reward": "learned reward, which is trained",
    "holdout": "held-out reward",
    "match": "gold match",
    "distance": "gold distance to the manifold",
}
WIDTH = 3  # validations in a mean
Record = dict[str, Any]


def distil(folder: Path) -> Record:
    """The validations of a run: iteration, distance from the base model, and each clip's measurements."""
    run = read_run(folder)
    clips = read_validations(folder)
    if len(run.validations) < WIDTH:
        raise RunError(
            f"{folder} has {len(run.validations)} validation(s); at least {WIDTH} make a curve"
        )
    steps = [line["step"] for line in run.validations]
    measures = {
        "reward": lambda clip: clip.reward,
        "holdout": lambda clip: clip.held_out,
        "match": lambda clip: clip.values["gold/match"],
        "distance": lambda clip: clip.values["gold/distance"],
    }
    values = {
        name: [[round(measure(clip), 4) for clip in clips[step]] for step in steps]
        for name, measure in measures.items()
    }
    config_file = folder / "config.yaml"
    config = yaml_mapping(config_file.read_text(encoding="utf-8"), str(config_file))
    return {
        "name": folder.name,
        "flags": {name: config[name] for name in FLAGS},
        "step": steps,
        "root_kl": [round(x, 4) for x in distances(run)],
    } | values


def keep(path: Path, folders: Sequence[Path]) -> list[Record]:
    """Add run folders to the file of records, each in place of an earlier one of its name; returns all records."""
    runs = {record["name"]: record for record in records.read_lines(path)}
    for folder in folders:
        runs[folder.name] = distil(folder)
    if folders:
        records.write_lines(path, runs.values())
    return list(runs.values())


def distances(run: RunHistory) -> list[float]:
    """Square root of the KL to the base model at each validation, from the iterations just before it."""
    steps = column(run.full_lines, "step")
    kls = column(run.full_lines, "kl/anchor")
    roots = []
    for step in column(run.validations, "step"):
        before = kls[(steps <= step) & (steps > 0.9 * step)]
        roots.append(float(np.sqrt(np.nanmean(before))) if len(before) and step else 0.0)
    return roots


def smooth(values: Sequence[float]) -> np.ndarray:
    """Means over WIDTH neighbors, fewer at the ends; the first value, the base model's, stays."""
    reach = WIDTH // 2
    means = [np.mean(values[max(i - reach, 1) : i + reach + 1]) for i in range(1, len(values))]
    return np.array([values[0], *means])


def changed(
    record: Record, name: str, before: Sequence[int], after: Sequence[int]
) -> tuple[float, float]:
    """How a measurement changed between two sets of iterations, clip by clip: mean, and half of the 95 % interval."""
    change = interval((clip_means(record, name, after) - clip_means(record, name, before)).tolist())
    return change.mean, change.half


def clip_means(record: Record, name: str, steps: Sequence[int]) -> np.ndarray:
    """A measurement of each clip, mean over the validations after `steps`, (clips,)."""
    return np.mean([record[name][record["step"].index(step)] for step in steps], axis=0)


def keeps(record: Record) -> bool:
    """Whether a KL holds the run back; one of a tiny weight only measures the distance."""
    return record["flags"]["kl_weight"] > 1e-6


def label_of(record: Record) -> str:
    """What the legend calls a run."""
    flags = record["flags"]
    kl = f"KL weight {flags['kl_weight']:g}" if keeps(record) else "no KL"
    return f"{kl}, learning rate {flags['learning_rate']:g}, seed {flags['seed']}"


def draw(runs: Sequence[Record]) -> Figure:
    """A panel per measurement: its mean over clips against the distance from the base model, one line per run."""
    figure = Figure(figsize=(10.5, 3.4), layout="constrained")
    axes = figure.subplots(1, len(PANELS))
    free = [record for record in runs if not keeps(record)]
    kept = [record for record in runs if keeps(record)]
    for ax, (key, title) in zip(axes, PANELS.items(), strict=True):
        for record, color in zip([*free, *kept], (BLUE, ORANGE, GREY, GREEN), strict=False):
            means = [float(np.mean(clips)) for clips in record[key]]
            style = {"color": color, "marker": "o", "ms": 2, "lw": 1}
            ax.plot(smooth(record["root_kl"]), smooth(means), label=label_of(record), **style)
        ax.axvline(stopped(free[0]), color=BLUE, lw=1, ls="--")
        for record in kept:
            ax.axvline(stopped(record), color=GREEN, lw=1, ls="--")
        ax.set(title=title, xlabel="root of the KL to the base model")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
    return figure


def stopped(record: Record) -> float:
    """How far a run is from the base model: where its held-out reward is highest, or at its end if a KL keeps it."""
    if keeps(record):
        return record["root_kl"][-1]
    best = int(np.argmax([np.mean(clips) for clips in record["holdout"]]))
    return record["root_kl"][best]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--distil", nargs="+", type=Path, default=[], metavar="RUN", help="run folders to keep")
    add("--records", type=Path, default=KEPT, help="file of kept runs")
    add("--output", type=Path, default=FIGURE, help="figure to draw")
    args = parser.parse_args(arguments)
    try:
        runs = keep(args.records, args.distil)
        if not runs:
            raise RunError(f"{args.records} has no records: --distil makes them")
    except RunError as error:
        sys.exit(f"overoptimisation.py: {error}")
    with matplotlib.rc_context(fname=STYLE):
        draw(runs).savefig(args.output, dpi=120)
    print(args.output)


if __name__ == "__main__":
    main()
