"""What to change in a run that does not fit into memory."""

import json
from dataclasses import replace
from functools import reduce
from itertools import accumulate
from pathlib import Path
from typing import Any

from sage_grpo.tools.plan.memory import fits, peak
from sage_grpo.tools.plan.model import Plan
from sage_grpo.tools.plan.planner import plan_of

Remedy = tuple[str, Any, str]


# What to trade for memory, cheapest first: a flag, its new value, and the cost.
REMEDIES: list[Remedy] = json.loads(
    Path(__file__).parents[1].joinpath("templates", "remedies.json").read_text()
)


def remedies(plan: Plan, gpu_bytes: float) -> list[tuple[str, str, Plan]]:
    """A minimal set of changes that makes the plan fit; or all that help, if they are not enough."""
    chosen, reached = [], plan
    for remedy in REMEDIES:
        while not fits(reached, gpu_bytes) and (other := changed(reached, remedy)) is not reached:
            reached = other
            chosen.append(remedy)
    for remedy in REMEDIES:
        rest = [other for other in chosen if other is not remedy]
        if fits(reduce(changed, rest, plan), gpu_bytes):
            chosen = rest
    _, *plans = accumulate(chosen, changed, initial=plan)
    found = zip(chosen, plans, strict=True)
    return [
        (f"--{name} {getattr(after.config, name)}", price, after)
        for (name, _, price), after in found
    ]


def changed(plan: Plan, remedy: Remedy) -> Plan:
    """The plan with another value of a flag; as it was if that saves nothing or cannot run."""
    (name, value, _), c = remedy, plan.config
    relative = {"twice the ranks": 2 * c.sp_size, "half the frames": c.num_frames // 8 * 4 + 1}
    try:
        other = plan_of(
            replace(c, **{name: relative.get(value, value)}),
            plan.gpus,
            plan.text_tokens,
            plan.rates.card,
        )
    except ValueError:  # a layout that does not divide
        return plan
    return other if peak(other)[1] < peak(plan)[1] else plan
