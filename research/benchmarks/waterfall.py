"""Seconds of a clip at full size, change by change, from the published settings to the recipe: docs/scaling.md.

python -m research.benchmarks.waterfall        (computed by the planner; draws docs/figures/waterfall.png, prints the table)
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
    found = {}
    for name, change in CHANGES.items():
        words = [word for key, value in change.items() for word in (f"--{key}", value)]
        found[name] = plan_of(parse(["--config", str(ROOT / RECIPE), *words]), 1)
    return found


def seconds(plan: Plan) -> dict[str, float]:
    """By phase, of one clip."""
    return {name: value / plan.clips for name, value in times(plan).items()}


def table(found: dict[str, Plan]) -> str:
    lines = ["| | " + " | ".join(COLORS) + " | s per clip | clips per GPU-hour |"]
    lines.append("|---|" + "---:|" * (len(COLORS) + 2))
    for name, plan in found.items():
        parts = seconds(plan)
        cells = [f"{parts[phase]:.1f}" for phase in COLORS]
        lines.append(
            f"| {name} | {' | '.join(cells)} | {sum(parts.values()):.1f} | {clips_per_gpu_hour(plan):.0f} |"
        )
    return "\n".join(lines) + "\n"


def draw(found: dict[str, Plan]) -> Figure:
    figure = Figure(figsize=(9, 2.9), layout="constrained")
    ax = figure.subplots()
    for row, plan in enumerate(found.values()):
        left = 0.0
        for phase, color in COLORS.items():
            width = seconds(plan)[phase]
            ax.barh(row, width, left=left, color=color, label=None if row else phase)
            left += width
        text = f"{left:.1f} s, {clips_per_gpu_hour(plan):.0f} clips per GPU-hour"
        ax.text(left + 0.8, row, text, va="center", fontsize=8)
    ax.set_yticks(range(len(found)), list(found))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.3 * sum(seconds(next(iter(found.values()))).values()))
    ax.set_xlabel("seconds of one H200 per clip of 81 x 352 x 624")
    ax.legend(fontsize=8, loc="center right")
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures" / "waterfall.png")
    args, found = parser.parse_args(arguments), plans()
    with matplotlib.rc_context(fname=STYLE):
        draw(found).savefig(args.output, dpi=110)
    print(table(found))


if __name__ == "__main__":
    main()
