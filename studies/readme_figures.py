"""Draws the README figures from a run of the embedded model: clips before and after, and training curves.

    python -m studies.readme_figures outputs/tiny_cpu --output docs/figures        (make figures does this)

Clips are from every sixteenth held-out prompt, sampled without noise from the same seeds; none are hand-picked.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from sage_grpo.runs.history import RunError, RunHistory, column, read_run
from sage_grpo.runs.media import read_mp4
from sage_grpo.tools.report_figures import BLUE, GREEN, GREY, STYLE, draw_curve

EVERY, FRAMES = 16, 4  # prompt stride, and frames shown per clip
MOTION_FPS = 6  # of the GIF, in which every other pixel of the enlarged clips is shown
CURVES = {
    "reward/total": ("reward, which is trained", BLUE),
    "gold/match": ("gold: share of clips that match their prompt", GREEN),
    "gold/distance": ("gold: distance to the manifold, lower is better", GREEN),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder with validations at its start and end")
    parser.add_argument("--output", type=Path, default=Path("docs/figures"))
    args = parser.parse_args(arguments)
    try:
        run = read_run(args.run)
        steps = [line["step"] for line in run.validations]
        if len(steps) < 2:
            raise RunError(f"{args.run} has {len(steps)} validation(s); two are needed: validate_at_step0 True")
    except RunError as error:
        sys.exit(f"readme_figures.py: {error}")
    args.output.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(fname=STYLE):
        before_after(args.run, steps[0], steps[-1]).savefig(args.output / "before_after.png", dpi=110)
        write_motion(args.output / "before_after.gif", args.run, steps[0], steps[-1])
        curves(run).savefig(args.output / "demo_curves.png", dpi=130)


def before_after(folder: Path, first: int, last: int) -> Figure:
    """One row per prompt: frames of the clip before and after, with the reward above each."""
    sides = [folder / "validation" / f"step-{step:06d}" for step in (first, last)]
    records = [json.loads((side / "clips.json").read_text(encoding="utf-8"))[::EVERY] for side in sides]
    figure = Figure(figsize=(9.6, 1.32 * len(records[0])), layout="constrained")
    axes = figure.subplots(len(records[0]), 2, squeeze=False)
    for row, pair in zip(axes, zip(*records, strict=True), strict=True):
        for ax, side, record, when in zip(row, sides, pair, ("before", "after"), strict=True):
            clip, _ = read_mp4(side / record["file"])
            shown = clip[np.linspace(0, len(clip) - 1, FRAMES).round().astype(int)]
            ax.imshow(np.concatenate([np.pad(f, ((0, 0), (0, 12), (0, 0)), constant_values=255) for f in shown], 1))
            ax.set_title(f"{when}: {record['scores']['total']:+.2f}", fontsize=8, loc="left", color="#52606d", pad=2)
            ax.axis("off")
        row[0].text(0, 1.22, pair[0]["prompt"], transform=row[0].transAxes, fontsize=9)
    return figure


def write_motion(path: Path, folder: Path, first: int, last: int) -> None:
    """The same clips as an animation, those before training on top."""
    rows = []
    for step in (first, last):
        side = folder / "validation" / f"step-{step:06d}"
        records = json.loads((side / "clips.json").read_text(encoding="utf-8"))[::EVERY]
        clips = [read_mp4(side / record["file"])[0] for record in records]
        edges = [np.pad(clip, ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=255) for clip in clips]
        rows.append(np.concatenate(edges, axis=2))
    frames = np.concatenate(rows, axis=1)[:, ::2, ::2]
    first_frame, *others = map(Image.fromarray, frames)
    first_frame.save(path, save_all=True, append_images=others, duration=1000 // MOTION_FPS, loop=0)


def curves(run: RunHistory) -> Figure:
    """Training metrics by iteration, with validations and their standard errors."""
    figure = Figure(figsize=(10.5, 2.7), layout="constrained")
    for ax, (key, (title, colour)) in zip(figure.subplots(1, len(CURVES)), CURVES.items(), strict=True):
        draw_curve(ax, column(run.train, "step"), column(run.train, key), colour, "training, with noise")
        steps, values = column(run.validations, "step"), column(run.validations, key)
        errors = column(run.validations, f"{key}_stderr")
        ax.errorbar(steps, values, errors, fmt="o", color=GREY, capsize=3, label="held-out prompts, without noise")
        ax.set_title(title, fontsize=8.5, loc="left")
        ax.set_xlabel("iteration")
    figure.axes[0].legend(fontsize=7, loc="lower right")
    return figure


if __name__ == "__main__":
    main()
