"""Seconds of a clip at full size, change by change, from the published settings to the recipe: docs/scaling.md.

    python -m research.benchmarks.waterfall

The planner computes them. Draws docs/figures/waterfall.png and prints the table.
"""

import argparse
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from sage_grpo.config.parse import parse
from sage_grpo.tools.figure_style import BLUE, GREEN, GREY, ORANGE, PURPLE, STYLE
from sage_grpo.tools.plan.model import Plan
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.tools.plan.times import clips_per_gpu_hour, times

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "configs/hunyuan15_1gpu_lora.yaml"
TILED = {"decode_gb": "0"}
ALL_STEPS = {"sde_window": "all", "same_init_noise": "False", "tail_steps": "0"} | TILED
CHANGES = {  # what is taken back, cumulatively, from the recipe
    "all 20 steps explore": ALL_STEPS,
    "2 steps, a window for each prompt": ALL_STEPS | {"sde_window": "random:2"},
    "shared steps before the window": {"tail_steps": "0"} | TILED,
    "a tail of 5 steps": TILED,
    "clips are decoded whole: the recipe": {},
    "guidance-distilled weights": {"guidance_scale": "1"},
}
COLORS = {"rollout": BLUE, "decode": GREEN, "reward": GREY, "anchor": ORANGE, "update": PURPLE}


def plans() -> dict[str, Plan]:
    """The plan of each row."""
    by_name = {}
    for name, change in CHANGES.items():
        flags = ["--config", str(ROOT / RECIPE)]
        for flag, value in change.items():
            flags += [f"--{flag}", value]
        by_name[name] = plan_of(parse(flags), 1)
    return by_name


def seconds(plan: Plan) -> dict[str, float]:
    """Seconds of one clip by phase."""
    return {name: value / plan.clips for name, value in times(plan).items()}


def table(by_name: dict[str, Plan]) -> str:
    lines = ["| | " + " | ".join(COLORS) + " | s per clip | clips per GPU-hour |"]
    lines.append("|---|" + "---:|" * (len(COLORS) + 2))
    for name, plan in by_name.items():
        phases = seconds(plan)
        cells = [name, *(f"{phases[phase]:.1f}" for phase in COLORS)]
        cells += [f"{sum(phases.values()):.1f}", f"{clips_per_gpu_hour(plan):.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(by_name: dict[str, Plan]) -> Figure:
    """A stacked bar per plan."""
    figure = Figure(figsize=(9, 2.9), layout="constrained")
    ax = figure.subplots()
    for row, plan in enumerate(by_name.values()):
        left = 0.0
        for phase, color in COLORS.items():
            width = seconds(plan)[phase]
            ax.barh(row, width, left=left, color=color, label=None if row else phase)
            left += width
        text = f"{left:.1f} s, {clips_per_gpu_hour(plan):.0f} clips per GPU-hour"
        ax.text(left + 0.8, row, text, va="center", fontsize=8)
    ax.set_yticks(range(len(by_name)), list(by_name))
    ax.invert_yaxis()
    slowest = next(iter(by_name.values()))
    ax.set_xlim(0, 1.3 * sum(seconds(slowest).values()))
    ax.set_xlabel("seconds of one H200 per clip of 81 x 352 x 624")
    ax.legend(fontsize=8, loc="center right")
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures" / "waterfall.png")
    args = parser.parse_args(arguments)
    by_name = plans()
    with matplotlib.rc_context(fname=STYLE):
        draw(by_name).savefig(args.output, dpi=110)
    print(table(by_name))


if __name__ == "__main__":
    main()
