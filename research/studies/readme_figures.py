"""Draws the README figures from a run of the embedded model: clips before and after, and training curves.

    python -m research.studies.readme_figures outputs/tiny_cpu --output docs/figures        (make figures does this)

Clips are of held-out prompts, sampled without noise from the same seeds. None are hand-picked: all are shown small, and
four in detail, at the quantiles 1/8, 3/8, 5/8 and 7/8 of the gain in reward.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from research.studies.statistics import halves_95
from sage_grpo.runs.history import RunError, RunHistory, column, read_run
from sage_grpo.runs.media import read_mp4
from sage_grpo.tools.figure_style import BLUE, GREEN, GREY, STYLE
from sage_grpo.tools.report.figures import draw_curve

SHOWN, FRAMES = 4, 4  # clips in detail, and frames of each
COLUMNS, EDGE = 8, 10  # of the clips that are shown small, and the width of their frame in pixels
MOTION_FPS = 6  # of the GIF, in which every other pixel of the enlarged clips is shown
CURVES = {
    "reward/total": ("reward, which is trained", BLUE),
    "gold/match": ("gold: share of clips that match their prompt", GREEN),
    "gold/distance": ("gold: distance to the manifold, lower is better", GREEN),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder with validations at its start and end")
    parser.add_argument("--output", type=Path, default=Path("docs/figures"))
    args = parser.parse_args(arguments)
    try:
        run = read_run(args.run)
        steps = [line["step"] for line in run.validations]
        if len(steps) < 2:
            raise RunError(
                f"{args.run} has {len(steps)} validation(s); two are needed: validate_at_step0 True"
            )
    except RunError as error:
        sys.exit(f"readme_figures.py: {error}")
    args.output.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(fname=STYLE):
        before_after(args.run, steps[0], steps[-1]).savefig(
            args.output / "before_after.png", dpi=110
        )
        write_motion(args.output / "before_after.gif", args.run, steps[0], steps[-1])
        curves(run).savefig(args.output / "demo_curves.png", dpi=130)


def sides_of(folder: Path, *steps: int) -> list[list[dict]]:
    """The records of the validations after `steps`, with the clips' paths."""
    sides = [folder / "validation" / f"step-{step:06d}" for step in steps]
    records = [json.loads((side / "clips.json").read_text(encoding="utf-8")) for side in sides]
    return [
        [r | {"path": side / r["file"]} for r in rows]
        for side, rows in zip(sides, records, strict=True)
    ]


def chosen(sides: list[list[dict]]) -> list[tuple[dict, dict]]:
    """The clips at evenly spaced quantiles of the gain in reward, before and after."""
    pairs = sorted(
        zip(*sides, strict=True),
        key=lambda pair: pair[1]["scores"]["total"] - pair[0]["scores"]["total"],
    )
    return [pairs[len(pairs) * (2 * i + 1) // (2 * SHOWN)] for i in range(SHOWN)]


def before_after(folder: Path, first: int, last: int) -> Figure:
    """One frame of every clip; below them four prompts with frames of their clips and the reward above each."""
    sides = sides_of(folder, first, last)
    figure = Figure(figsize=(9.6, 10.1), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(5.1, 1.2 * SHOWN))
    for ax, records, when in zip(top.subplots(1, 2), sides, ("before", "after"), strict=True):
        ax.imshow(mosaic(records))
        right = sum(record["gold"]["match"] > 0 for record in records)
        ax.set_title(
            f"{when}: {right} of {len(records)} clips match their prompt", fontsize=9, loc="left"
        )
        ax.axis("off")
    for row, pair in zip(bottom.subplots(SHOWN, 2), chosen(sides), strict=True):
        for ax, record, when in zip(row, pair, ("before", "after"), strict=True):
            clip, _ = read_mp4(record["path"])
            shown = clip[np.linspace(0, len(clip) - 1, FRAMES).round().astype(int)]
            ax.imshow(
                np.concatenate(
                    [np.pad(f, ((0, 0), (0, 12), (0, 0)), constant_values=255) for f in shown], 1
                )
            )
            ax.set_title(
                f"{when}: {record['scores']['total']:+.2f}",
                fontsize=8,
                loc="left",
                color="#52606d",
                pad=2,
            )
            ax.axis("off")
        row[0].text(0, 1.22, pair[0]["prompt"], transform=row[0].transAxes, fontsize=9)
    return figure


def mosaic(records: list[dict]) -> np.ndarray:
    """The middle frame of each clip, with a green frame where the oracle finds all that the prompt names."""
    cells = []
    for record in records:
        clip, _ = read_mp4(record["path"])
        middle = np.asarray(clip[len(clip) // 2])
        color = np.array(to_rgb(GREEN if record["gold"]["match"] else "#d5dae0")) * 255
        cell = np.full((middle.shape[0] + 4 * EDGE, middle.shape[1] + 4 * EDGE, 3), 255, np.uint8)
        cell[EDGE:-EDGE, EDGE:-EDGE] = color.astype(np.uint8)
        cell[2 * EDGE : -2 * EDGE, 2 * EDGE : -2 * EDGE] = middle
        cells.append(cell)
    cells += [np.full_like(cells[0], 255)] * (
        -len(cells) % COLUMNS
    )  # white to the end of the last row
    return np.concatenate(
        [np.concatenate(cells[i : i + COLUMNS], axis=1) for i in range(0, len(cells), COLUMNS)]
    )


def write_motion(path: Path, folder: Path, first: int, last: int) -> None:
    """Write the clips as an animation: before training above, after training below."""
    rows = []
    for records in zip(*chosen(sides_of(folder, first, last)), strict=True):
        clips = [read_mp4(record["path"])[0] for record in records]
        edges = [
            np.pad(clip, ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=255) for clip in clips
        ]
        rows.append(np.concatenate(edges, axis=2))
    frames = np.concatenate(rows, axis=1)[:, ::2, ::2]
    first_frame, *others = map(Image.fromarray, frames)
    first_frame.save(path, save_all=True, append_images=others, duration=1000 // MOTION_FPS, loop=0)


def curves(run: RunHistory) -> Figure:
    """Training metrics by iteration, with validations and their 95 % intervals."""
    figure = Figure(figsize=(10.5, 2.9), layout="constrained")
    for ax, (key, (title, colour)) in zip(
        figure.subplots(1, len(CURVES)), CURVES.items(), strict=True
    ):
        draw_curve(
            ax, column(run.train, "step"), column(run.train, key), colour, "training, with noise"
        )
        steps, values = column(run.validations, "step"), column(run.validations, key)
        bars = {"yerr": halves_95(run.validations, key), "fmt": "o", "color": GREY, "capsize": 3}
        ax.errorbar(
            steps, values, **bars, label="held-out prompts, without noise; bars: 95 % interval"
        )
        ax.set_title(title, fontsize=8.5, loc="left")
        ax.set_xlabel("iteration")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=2
    )
    return figure


if __name__ == "__main__":
    main()
