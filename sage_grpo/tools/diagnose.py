"""Why is my reward flat? Prints what is wrong with a run, the likeliest cause first, from its folder alone.

    python -m sage_grpo.tools.diagnose RUN

docs/diagnosis.md explains the findings. Exit code 0: none; 1: some; 2: the folder cannot be read.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sage_grpo.config.command_line import answer_early, answering
from sage_grpo.tools.options import ToolParser


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ToolParser("python -m sage_grpo.tools.diagnose", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    return parser.parse_args(arguments)


answer_early(__name__, parse_arguments)

from sage_grpo.runs.diagnosis import Case, Finding, diagnose
from sage_grpo.runs.history import read_run
from sage_grpo.tools.plan.model import CARDS, times
from sage_grpo.tools.plan.planner import plan_of

LARGE = 1e9  # parameters; the planner does not know the time of smaller models, which wait for kernel launches
DIRECTIONS = {
    1: "The reward rises.",
    0: "The reward is flat.",
    -1: "The reward falls.",
    None: "Too early to judge.",
}


def late(case: Case) -> list[Finding]:
    """A finding if iterations take far longer than planned, where the planner knows the machine and the model."""
    head = case.run.head
    card = next((card for card in CARDS if card in str(head.get("device")).lower()), None)
    plan = plan_of(case.config, head.get("ranks") or 1, card=card) if card else None
    if (
        plan is None
        or plan.model.parameters < LARGE
        or plan.trained.total != head.get("trainable_parameters")
    ):
        return []
    values = {"measured": case.ends("time/total")[0], "planned": sum(times(plan).values())}
    return (
        [Finding("slower than planned", values)]
        if values["measured"] > 2 * values["planned"]
        else []
    )


@answering("")
def main(arguments: Sequence[str] | None = None) -> int:
    run = read_run(parse_arguments(arguments).run)
    case = Case(run)
    found = diagnose(run) + late(case)
    print(
        DIRECTIONS[case.direction], "" if found else "Nothing is wrong as far as it was recorded."
    )
    for number, one in enumerate(found, 1):
        print(f"{number}. {one}" + (f" Panel of report.html: {one.panel}." if one.panel else ""))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
