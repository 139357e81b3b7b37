"""The planner's figures in the tables of recipes: README.md, docs/scaling.md and research/benchmarks/scaling.md.

`python -m research.benchmarks.scaling_tables` writes them. A row that links a recipe and names the cards for it,
such as `8 x H100`, gets the planner's figures under the headings of FIGURES; all other cells are left as they are.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path

from sage_grpo.config.parse import parse
from sage_grpo.tools.plan.calibration import GPU_MODELS
from sage_grpo.tools.plan.memory import fits, peak
from sage_grpo.tools.plan.model import Plan
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.tools.plan.times import run_time, times, validation_time
from sage_grpo.train.inputs import validation_requests

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "scaling.md",
    ROOT / "research" / "benchmarks" / "scaling.md",
)
PRICES = {"h100": 2.5, "4090": 0.4}  # dollars for an hour of one GPU, in November 2026
# Updates after which 64 pairs of clips tell the gain on the embedded world from chance
# (python -m research.studies.first_hours)
UPDATES_TO_VERDICT = {"grpo": 20, "nft": 8, "awm": 8}
RECIPE = re.compile(r"\]\((?:\.\./)*(configs/\w+\.yaml)\)")
CARDS = re.compile(r"\b(\d+) x (?:RTX )?(\w+)")


def duration(seconds: float) -> str:
    hours = seconds / 3600
    if seconds < 60:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{60 * hours:.0f} min"
    if hours < 48:
        return f"{hours:.1f} h" if hours < 10 else f"{hours:.0f} h"
    return f"{hours / 24:.1f} days"


def validation_clips(plan: Plan) -> int:
    return len(validation_requests(plan.config))


def trained_weights(plan: Plan) -> str:
    return "LoRA" if plan.config.use_lora else "all"


def learning_rate(plan: Plan) -> str:
    """Always in scientific notation, such as 1e-4, so that rows are easy to compare."""
    mantissa, exponent = f"{plan.config.learning_rate:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def clip_size(plan: Plan) -> str:
    c = plan.config
    return f"{c.num_frames} x {c.height} x {c.width}"


def peak_memory(plan: Plan) -> str:
    _, peak_bytes = peak(plan)
    return f"{peak_bytes / 1e9:.0f} GB"


def iteration(plan: Plan) -> str:
    text = f"{sum(times(plan).values()):.0f} s"
    if plan.gpus > 1:
        text += f", {sum(times(plan, overlap=False).values()):.0f} s if nothing overlaps"
    return text


def update(plan: Plan) -> float:
    """Seconds of an optimizer step, with the iterations that it waits for."""
    c = plan.config
    return sum(times(plan).values()) * c.gradient_accumulation_steps / c.updates_per_rollout


def validation(plan: Plan) -> str:
    seconds = validation_time(plan, validation_clips(plan))
    between = plan.config.validation_interval * sum(times(plan).values())
    return f"{validation_clips(plan)} clips, {duration(seconds)} every {duration(between)}"


def time_to_verdict(plan: Plan) -> float:
    """Seconds until the first validation after so many updates, with all validations before it."""
    c = plan.config
    updates = UPDATES_TO_VERDICT[c.algorithm]
    iterations = updates * c.gradient_accumulation_steps / c.updates_per_rollout
    intervals = math.ceil(iterations / c.validation_interval)
    training = intervals * c.validation_interval * sum(times(plan).values())
    validations = int(c.validate_at_step0) + intervals
    return training + validations * validation_time(plan, validation_clips(plan))


def price(plan: Plan) -> str:
    hours = run_time(plan, validation_clips(plan)) / 3600
    return f"${hours * plan.gpus * PRICES[plan.rates.gpu_model]:,.0f}"


FIGURES: dict[str, Callable[[Plan], str]] = {
    "algorithm": lambda plan: plan.config.algorithm,
    "weights": trained_weights,
    "learning rate": learning_rate,
    "clip": clip_size,
    "clips per iteration": lambda plan: str(plan.clips),
    "prompts per update": lambda plan: str(
        plan.clips // plan.config.num_generations * plan.config.gradient_accumulation_steps
    ),
    "peak": peak_memory,
    "iteration": iteration,
    "update": lambda plan: duration(update(plan)),
    "validation": validation,
    "first verdict": lambda plan: duration(time_to_verdict(plan)),
    "whole run": lambda plan: duration(run_time(plan, validation_clips(plan))),
    "price": price,
}


def planned(row: str) -> Plan | None:
    """The plan of a table's row: its recipe on the cards that it names; None for other rows."""
    recipe = RECIPE.search(row)
    cards = CARDS.search(row)
    if not recipe or not cards:
        return None
    count, gpu_model = int(cards[1]), cards[2].lower()
    config = parse(["--config", str(ROOT / recipe[1]), "--pretrained_model_root", "no/such/folder"])
    if count != config.gpus:
        raise ValueError(f"{recipe[1]} is written for {config.gpus} GPUs; its row names {count}")
    plan = plan_of(config, count, gpu_model=gpu_model)
    if not fits(plan, GPU_MODELS[gpu_model].memory):
        raise ValueError(f"{recipe[1]} does not fit the cards that its row names: {cards[0]}")
    return plan


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def refreshed(text: str) -> str:
    """A page with the planner's figures in its tables of recipes."""
    lines = []
    headings: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            headings = []
        elif not headings:
            headings = cells(line)
        elif plan := planned(line):
            values = [
                FIGURES[heading](plan) if heading in FIGURES else cell
                for heading, cell in zip(headings, cells(line), strict=True)
            ]
            line = f"| {' | '.join(values)} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    for page in PAGES:
        page.write_text(refreshed(page.read_text()))
