"""Draws the figures of README.md and docs/results.md from a run of the embedded model and the records of the studies.

    python -m research.studies.readme_figures outputs/tiny_cpu --output docs/figures        (make figures does this)

    headline.png               clips before and after the run, beside gold match against compute
    before_after.gif           the same clips in motion
    all_clips.png              the middle frame of every held-out clip, before and after
    match_against_compute.png  gold match against compute alone, all methods
    trained_clips.png          the same for the number of trained clips

Held-out prompts are sampled without exploration noise, from the same seeds before and after. Of the clips that match
their prompt only after training, the ones shown in detail moved most toward it, by the oracle's distance; all_clips.png
leaves none out.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure, SubFigure
from PIL import Image

from research.studies import compute, second_edition, third_edition
from research.studies.questions import Study, StudyPlan
from research.studies.records import Record, read_all, validated
from research.studies.result_tables import Arms, arms_of
from research.studies.second_edition import RECIPE
from sage_grpo.runs.history import RunError, read_run
from sage_grpo.runs.media import read_mp4
from sage_grpo.tools.figure_style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, STYLE

SHOWN = 5  # clips in detail
FRAMES = 3  # of each of them
COLUMNS = 8  # of all clips
EDGE = 10  # pixels of the frame around a small clip
MOTION_FPS = 6

Clip = dict[str, Any]  # a record of clips.json, with the path of its file
Pair = tuple[Clip, Clip]  # the same prompt and seed before and after training

# method of the head-to-head -> its name in the figure and its color; the others are gray
NAMED = {
    "nft": ("DiffusionNFT (nft)", BLUE),
    "awm": ("AWM (awm)", GREEN),
    "MixGRPO, sliding window of 4": ("GRPO, sliding window", PURPLE),
    "flash, 1 step per prompt": ("GRPO, 1 exploring step", ORANGE),
    "published": ("SAGE-GRPO, as published", RED),
}
# the same for the third edition
NAMED_SHARES = {
    "nft, all of 8": ("nft, all of 8 clips", BLUE),
    "nft, best and worst of 8": ("nft, best and worst of 8", RED),
    "nft, 4 of 8": ("nft, 4 of 8", PURPLE),
    "awm, all of 8": ("awm, all of 8", GREEN),
    "flash, all of 8": ("GRPO, all of 8", ORANGE),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder with validations at its start and end")
    parser.add_argument("--output", type=Path, default=Path("docs/figures"))
    args = parser.parse_args(arguments)
    try:
        pairs = validation_pairs(args.run)
    except RunError as error:
        sys.exit(f"readme_figures.py: {error}")
    arms = head_to_head()
    args.output.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(fname=STYLE):
        headline(pairs, arms).savefig(args.output / "headline.png", dpi=120)
        all_clips(pairs).savefig(args.output / "all_clips.png", dpi=110)
        figures = {
            "match_against_compute": match_against_compute(arms, NAMED),
            "trained_clips": match_against_compute(trained_clips(), NAMED_SHARES, "ways to train"),
        }
        for name, figure in figures.items():
            figure.savefig(args.output / f"{name}.png", dpi=120)
    write_motion(args.output / "before_after.gif", most_improved(pairs))


def validation_pairs(run: Path) -> list[Pair]:
    """The clips of the first and the last validation of a run, prompt by prompt."""
    steps = [line["step"] for line in read_run(run).validations]
    if len(steps) < 2:
        raise RunError(
            f"{run} has {len(steps)} validation(s); two are needed: validate_at_step0 True"
        )
    before, after = (
        clips_of(run / "validation" / f"step-{step:06d}") for step in steps[:: len(steps) - 1]
    )
    return list(zip(before, after, strict=True))


def clips_of(folder: Path) -> list[Clip]:
    records = json.loads((folder / "clips.json").read_text(encoding="utf-8"))
    return [record | {"path": folder / record["file"]} for record in records]


def most_improved(pairs: Sequence[Pair]) -> list[Pair]:
    """The clips that moved most toward their prompt, among those that match it only after training."""

    def gain(pair: Pair) -> float:
        before, after = (clip["gold"]["prompt_distance"] for clip in pair)
        return before - after

    learned = [pair for pair in pairs if pair[1]["gold"]["match"] > pair[0]["gold"]["match"]]
    return sorted(learned, key=gain, reverse=True)[:SHOWN]


def matches(clips: Sequence[Clip]) -> int:
    """How many of the clips show everything their prompt names."""
    return sum(clip["gold"]["match"] > 0 for clip in clips)


def headline(pairs: Sequence[Pair], arms: Arms) -> Figure:
    """Clips on the left, gold match against compute on the right."""
    figure = Figure(figsize=(11.5, 5.7), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.0, 1.0))
    draw_clips(left, pairs)
    draw_compute(right.subplots(), arms, NAMED)
    return figure


def match_against_compute(
    arms: Arms, named: Mapping[str, tuple[str, str]], kind: str = "methods"
) -> Figure:
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    draw_compute(figure.subplots(), arms, named, kind)
    return figure


def draw_clips(figure: SubFigure, pairs: Sequence[Pair]) -> None:
    """A row for each prompt: frames before training on the left, after training on the right."""
    shown = most_improved(pairs)
    # fractions of the figure
    header = 0.05
    row_height = (1 - header) / SHOWN
    text_height = 0.038
    width = 0.48
    columns = (0.01, 0.99 - width)
    for side, when in enumerate(("base model", "after training")):
        count = matches([pair[side] for pair in pairs])
        title = f"{when}: {count} of {len(pairs)} match"
        figure.text(columns[side], 1 - header / 2, title, fontsize=11.5, va="center")
    for row, pair in enumerate(shown):
        top = 1 - header - row * row_height
        prompt = pair[0]["prompt"]
        figure.text(
            columns[0], top - text_height / 2, prompt, fontsize=10, va="center", color="black"
        )
        for side, clip in enumerate(pair):
            height = row_height - text_height - 0.008
            ax = figure.add_axes((columns[side], top - text_height - height, width, height))
            ax.imshow(film_strip(clip), aspect="auto")
            ax.axis("off")


def film_strip(clip: Clip) -> np.ndarray:
    """Evenly spaced frames of a clip side by side, with a white gap between them."""
    frames, _ = read_mp4(clip["path"])
    chosen = np.asarray(frames)[np.linspace(0, len(frames) - 1, FRAMES).round().astype(int)]
    gap = ((0, 0), (0, 8), (0, 0))
    return np.concatenate([np.pad(frame, gap, constant_values=255) for frame in chosen], axis=1)


def all_clips(pairs: Sequence[Pair]) -> Figure:
    """One frame of every clip; green where it matches its prompt."""
    figure = Figure(figsize=(9.6, 5.2), layout="constrained")
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    for ax, clips, when in zip(figure.subplots(1, 2), sides, ("before", "after"), strict=True):
        ax.imshow(mosaic(clips))
        ax.set_title(
            f"{when}: {matches(clips)} of {len(clips)} clips match their prompt",
            fontsize=10,
            loc="left",
        )
        ax.axis("off")
    return figure


def mosaic(clips: Sequence[Clip]) -> np.ndarray:
    """The middle frame of each clip, with a green frame where the oracle finds all that the prompt names."""
    cells = []
    for clip in clips:
        frames, _ = read_mp4(clip["path"])
        middle = np.asarray(frames[len(frames) // 2])
        color = np.array(to_rgb(GREEN if clip["gold"]["match"] else "#d5dae0")) * 255
        cell = np.full((middle.shape[0] + 4 * EDGE, middle.shape[1] + 4 * EDGE, 3), 255, np.uint8)
        cell[EDGE:-EDGE, EDGE:-EDGE] = color.astype(np.uint8)
        cell[2 * EDGE : -2 * EDGE, 2 * EDGE : -2 * EDGE] = middle
        cells.append(cell)
    blank = np.full_like(cells[0], 255)
    cells += [blank] * (-len(cells) % COLUMNS)  # up to the end of the last row
    rows = [np.concatenate(cells[i : i + COLUMNS], axis=1) for i in range(0, len(cells), COLUMNS)]
    return np.concatenate(rows)


def write_motion(path: Path, pairs: Sequence[Pair]) -> None:
    """Write the clips as an animation at half size: before training above, after training below."""
    rows = []
    for side in (0, 1):
        clips = [np.asarray(read_mp4(pair[side]["path"])[0]) for pair in pairs]
        border = ((0, 0), (2, 2), (2, 2), (0, 0))
        framed = [np.pad(clip, border, constant_values=255) for clip in clips]
        rows.append(np.concatenate(framed, axis=2))
    frames = np.concatenate(rows, axis=1)[:, ::2, ::2]
    first, *others = map(Image.fromarray, frames)
    first.save(path, save_all=True, append_images=others, duration=1000 // MOTION_FPS, loop=0)


def head_to_head() -> Arms:
    """The runs of the second edition's comparison of methods, by method and seed."""
    return study_arms("head_to_head", second_edition.studies(), second_edition.RESULTS)


def trained_clips() -> Arms:
    """The runs of the third edition's comparison of trained clips, by arm and seed."""
    return study_arms("clips", third_edition.studies(), third_edition.RESULTS)


def study_arms(name: str, studies: Mapping[str, Study], results: Path) -> Arms:
    plan = StudyPlan(recipe=RECIPE, studies=studies)
    return arms_of(plan, name, studies[name], read_all(results))


def draw_compute(
    ax: Axes, arms: Arms, named: Mapping[str, tuple[str, str]], kind: str = "methods"
) -> None:
    """Gold match against compute: means over seeds with 95 % intervals; arms that are not named in gray.

    kind: what the title calls the arms.
    """
    others = [arm for arm in arms if arm not in named]
    for arm in others:
        spent, means, _ = match_curve(arms[arm])
        ax.plot(spent, means, color=GREY, alpha=0.4, lw=1.2)
    ends = []
    for arm, (name, color) in named.items():
        spent, means, halves = match_curve(arms[arm])
        ax.plot(spent, means, color=color, marker="o", ms=4, lw=2.4)
        ax.fill_between(spent, means - halves, means + halves, color=color, alpha=0.18, lw=0)
        ends.append((means[-1], f"{name}: {means[-1]:.0%}", color))
    first_arm = arms[next(iter(named))]
    start = validated(next(iter(first_arm.values())), compute.MATCH, 0)
    ax.text(0, start - 0.02, f"base model: {start:.0%}", fontsize=10, va="top")
    ax.set_ylim(start - 0.08, 1.0)
    label_ends(ax, ends)
    ax.set_ylabel("clips that show everything their prompt names", fontsize=10)
    ax.set_xlabel("compute, in thousands of forwards of one clip", fontsize=10)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.tick_params(labelsize=9.5)
    seeds = sorted({len(runs) for runs in arms.values()})
    counts = " or ".join(map(str, seeds))
    title = f"{len(arms)} {kind} at equal compute, {counts} seeds each"
    ax.set_title(title, fontsize=11, loc="left", color="black")


def match_curve(records: Mapping[int, Record]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Thousands of units at each validation, mean gold match over seeds, half of its 95 % interval.

    A collapsed run has no last validation and is left out.
    """
    finished = [r for r in records.values() if not math.isnan(validated(r, compute.MATCH))]
    spent, _ = compute.validations(finished[0], compute.MATCH)
    values = np.array([compute.validations(record, compute.MATCH)[1] for record in finished])
    intervals = [compute.interval_of(column) for column in values.T]
    means = np.array([mean for mean, _ in intervals])
    halves = np.array([half for _, half in intervals])
    return spent / 1000, means, halves


def label_ends(ax: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write the labels (height, text, color) to the right of the curves, pushed apart where they would overlap."""
    right = max(line.get_xdata()[-1] for line in ax.lines)
    ax.set_xlim(-0.02 * right, 2 * right)
    ax.set_xticks([tick for tick in ax.get_xticks() if 0 <= tick <= right])
    low, high = ax.get_ylim()
    place = -math.inf
    for height, text, color in sorted(ends):
        place = max(height, place + 0.055 * (high - low))
        ax.text(1.03 * right, place, text, color=color, fontsize=10, va="center")


if __name__ == "__main__":
    main()
