"""Draws what training far beyond the gain does: reward and gold against the distance from the base model.

    python post_train.py --config configs/tiny_gpu.yaml --output_dir outputs/beyond --max_steps 3000 \
        --validation_interval 100 --use_moving_KL False --use_dual_kl False --kl_weight 1e-12 --holdout_reward shapes
    python -m studies.overoptimisation outputs/beyond --kept outputs/kept --output docs/figures/overoptimisation.png

As in the literature on overoptimisation of reward models (Gao et al., arXiv 2210.10760), the x axis is the square root
of the KL to the base model; a fixed anchor of no weight measures it. `--kept` is a run with a KL to the base model: a
line shows how far it went. Two more lines show where the held-out reward was highest, and where gold was.
"""

import argparse
import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from sage_grpo.runs.history import RunError, RunHistory, column, read_run
from sage_grpo.tools.figure_style import BLUE, GREEN, GREY, ORANGE, STYLE
from studies.statistics import halves_95

GOLD, REWARD, KL = "gold/match", "reward/total", "kl/anchor"


def distances(run: RunHistory) -> np.ndarray:
    """Square root of the KL to the base model at each validation, from the iterations just before it."""
    steps, values = column(run.train, "step"), column(run.train, KL)
    found = []
    for step in column(run.validations, "step"):
        before = values[(steps <= step) & (steps > 0.9 * step)]
        found.append(np.sqrt(np.nanmean(before)) if len(before) and step else 0.0)
    return np.array(found)


def holdout(run: RunHistory) -> np.ndarray:
    """The held-out reward at each validation, the sum of its scores."""
    return np.sum([column(run.validations, name) for name in sorted(run.holdouts)], axis=0)


def draw(run: RunHistory, kept: RunHistory | None = None) -> Figure:
    x, figure = distances(run), Figure(figsize=(7.2, 3.4), layout="constrained")
    reward = figure.subplots()
    gold = reward.twinx()
    curves = ((reward, REWARD, BLUE, "learnt reward, which is trained"), (gold, GOLD, GREEN, "gold match"))
    for ax, key, color, name in curves:
        bars = {"yerr": halves_95(run.validations, key), "color": color, "marker": "o", "ms": 3, "capsize": 2}
        ax.errorbar(x, column(run.validations, key), **bars, label=f"{name}; bars: 95 % interval")
        ax.set_ylabel(name, color=color)
    marks = {"gold is highest": (x[np.nanargmax(column(run.validations, GOLD))], GREEN)}
    if run.holdouts:
        marks["a held-out reward would stop here"] = (x[np.nanargmax(holdout(run))], GREY)
    if kept is not None:
        marks["with a KL, training ends here"] = (distances(kept)[-1], ORANGE)
    for name, (place, color) in marks.items():
        reward.axvline(place, color=color, lw=1, ls="--", label=name)
    reward.set_xlabel("square root of the KL to the base model")
    reward.legend(fontsize=7, loc="lower right")
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--kept", type=Path, help="a run with a KL to a fixed anchor")
    parser.add_argument("--output", type=Path, default=Path("docs/figures/overoptimisation.png"))
    args = parser.parse_args(arguments)
    try:
        run, kept = read_run(args.run), read_run(args.kept) if args.kept else None
        if len(run.validations) < 3:
            raise RunError(f"{args.run} has {len(run.validations)} validation(s); at least 3 make a curve")
    except RunError as error:
        sys.exit(f"overoptimisation.py: {error}")
    with matplotlib.rc_context(fname=STYLE):
        draw(run, kept).savefig(args.output, dpi=120)
    top, last = np.nanmax(column(run.validations, GOLD)), column(run.validations, GOLD)[-1]
    print(f"{args.output}: gold {top:.3f} at its highest, {last:.3f} at the end")


if __name__ == "__main__":
    main()
