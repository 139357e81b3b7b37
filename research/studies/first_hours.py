"""What the first hours of a run look like, from recorded runs of the embedded world and from the planner.

    python -m research.studies.first_hours

Draws docs/figures/first_hours.png. Left: gain in the validation reward against updates, of runs without averaged
weights (records/second.jsonl), and the smallest gain that so many validation clips tell from chance. Right: when
a recipe has its first clips, update, validation and verdict on the cards that it is written for.

Whether a gain is one is decided clip by clip. The records hold standard errors of means over 64 clips but no clips; by
what the pairs narrow an interval is taken from the demo, whose clips are known (docs/results.md, "Learning").
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from research.benchmarks.recipe_tables import planned, time_to_verdict, update
from research.studies.questions import ROOT
from research.studies.records import Record, read_all
from research.studies.second_edition import RESULTS
from sage_grpo.intervals import student_95
from sage_grpo.runs.history import as_float
from sage_grpo.tools.figure_style import BLUE, GREEN, GREY, ORANGE, STYLE
from sage_grpo.tools.plan.model import Plan
from sage_grpo.tools.plan.times import times, validation_time
from sage_grpo.train.inputs import validation_requests

REWARD = "reward/total"
RECORDED_CLIPS = 64
# The demo's half-widths: of the mean before, of the mean after, and of the difference clip by clip
BEFORE, AFTER, PAIRED = 0.42, 0.41, 0.37
PAIRING = PAIRED / math.hypot(BEFORE, AFTER)
NUMBERS_OF_CLIPS = (8, 16, 64)
START = 300.0  # seconds to load and compile, assumed


@dataclass(frozen=True)
class Arm:
    """Runs of a study, all seeds."""

    study: str
    name: str
    label: str
    color: str


ARMS = (
    Arm("raw_weights", "flash, 1 step per prompt", "grpo, 1 exploring step", ORANGE),
    Arm("guidance", "nft, unguided", "nft", BLUE),
    Arm("raw_weights", "awm", "awm", GREEN),
)
RECIPES = (
    ("hunyuan15_1gpu_lora", "1 x H100"),
    ("hunyuan15_1gpu_nft", "1 x H100"),
    ("wan21_1gpu_24gb_lora", "1 x RTX 4090"),
    ("wan21_1gpu_24gb_nft", "1 x RTX 4090"),
    ("hunyuan15_8gpu", "8 x H100"),
    ("hunyuan15_8gpu_nft", "8 x H100"),
    ("hunyuan15_8gpu_i2v", "8 x H100"),
    ("wan21_8gpu", "8 x H100"),
    ("hunyuan15_64gpu_720p", "64 x H100"),
    ("hunyuan15_64gpu", "64 x H100"),
)
MARKERS = {
    "first clips": "o",
    "first update": "s",
    "first validation after it": "^",
    "verdict": "*",
}


def runs_of(arm: Arm, records: Sequence[Record]) -> list[Record]:
    return [
        record for record in records if (record["study"], record["arm"]) == (arm.study, arm.name)
    ]


def validated_updates(record: Record) -> list[int]:
    """The update before each validation; these runs step once per iteration."""
    config = record["config"]
    last = config["max_steps"]
    return [*range(0, last, config["validation_interval"]), last]


def gains(runs: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Updates (N,), and the gain of each run at each of them, (runs, N)."""
    updates = np.array(validated_updates(runs[0]))
    rewards = np.array([[as_float(v) for v in run["validation"][REWARD]] for run in runs])
    return updates, rewards - rewards[:, :1]


def decidable_gain(runs: Sequence[Record], clips: int) -> float:
    """The smallest gain whose 95 % interval over `clips` pairs excludes 0, at the first validation after the start."""
    before, after = np.mean([run["validation"][f"{REWARD}_stderr"][:2] for run in runs], axis=0)
    deviation = PAIRING * math.hypot(before, after) * math.sqrt(RECORDED_CLIPS)
    return student_95(clips - 1) * deviation / math.sqrt(clips)


def updates_to_verdict(runs: Sequence[Record], clips: int) -> float:
    """Updates until the mean gain can be told from chance, linearly between validations."""
    updates, gain = gains(runs)
    return float(np.interp(decidable_gain(runs, clips), gain.mean(axis=0), updates))


def moments(plan: Plan) -> dict[str, float]:
    """Seconds from the start of a run until what MARKERS names."""
    c = plan.config
    validation = validation_time(plan, len(validation_requests(c)))
    iteration = sum(times(plan).values())
    return {
        "first clips": START + validation,
        "first update": START + validation + update(plan),
        "first validation after it": START + 2 * validation + c.validation_interval * iteration,
        "verdict": START + time_to_verdict(plan),
    }


def draw_gains(ax: Axes, records: Sequence[Record]) -> None:
    for arm in ARMS:
        runs = runs_of(arm, records)
        updates, gain = gains(runs)
        ax.plot(updates, gain.mean(axis=0), "o-", color=arm.color, label=arm.label, markersize=3)
        ax.fill_between(
            updates, gain.min(axis=0), gain.max(axis=0), color=arm.color, alpha=0.2, lw=0
        )
    grpo = runs_of(ARMS[0], records)
    for clips in NUMBERS_OF_CLIPS:
        level = decidable_gain(grpo, clips)
        ax.axhline(level, color=GREY, lw=0.8, ls="--")
        ax.text(100, level + 0.01, f"{clips} clips", ha="right", fontsize=7, color=GREY)
    ax.set_xlim(0, 100)
    ax.set_ylim(bottom=-0.05)
    ax.set_xlabel("updates of 16 prompts x 8 clips")
    ax.set_ylabel("gain in validation reward")
    ax.set_title("Embedded world: a gain above a dashed line is decided", fontsize=9)
    ax.legend(fontsize=7, loc="lower right")


def draw_moments(ax: Axes) -> None:
    for row, (recipe, cards) in enumerate(RECIPES):
        plan = planned(f"| [{recipe}](configs/{recipe}.yaml) | {cards} |")
        hours = {name: seconds / 3600 for name, seconds in moments(plan).items()}
        ax.plot([0.05, max(hours.values())], [row, row], color=GREY, lw=0.6, zorder=0)
        for name, marker in MARKERS.items():
            label = name if row == 0 else None
            ax.scatter(hours[name], row, marker=marker, s=36, label=label, color=BLUE, alpha=0.85)
    ax.set_yticks(
        range(len(RECIPES)), [f"{recipe}\n{cards}" for recipe, cards in RECIPES], fontsize=7
    )
    ax.set_ylim(len(RECIPES) + 0.4, -0.6)  # the first on top, and room for the legend below
    ax.set_xscale("log")
    ticks = (0.1, 0.25, 0.5, 1, 2, 4, 8)
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlabel("hours after the start, by the planner")
    ax.set_title("Verdict: 20 updates of grpo, 8 of nft; 64 clips", fontsize=9)
    ax.legend(fontsize=7, loc="lower center", ncols=len(MARKERS), columnspacing=1)


def draw(records: Sequence[Record]) -> Figure:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_gains(left, records)
    draw_moments(right)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "docs" / "figures" / "first_hours.png"
    )
    args = parser.parse_args(arguments)
    records = list(read_all(RESULTS).values())
    with matplotlib.rc_context(fname=STYLE):
        draw(records).savefig(args.output, dpi=110)
    for arm in ARMS:
        runs = runs_of(arm, records)
        updates = {clips: updates_to_verdict(runs, clips) for clips in NUMBERS_OF_CLIPS}
        text = ", ".join(f"{count:.0f} with {clips} clips" for clips, count in updates.items())
        print(f"{arm.label}: updates until the gain is decided: {text}")


if __name__ == "__main__":
    main()
