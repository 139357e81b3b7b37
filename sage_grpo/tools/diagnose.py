"""Why is my reward flat? Prints what is wrong with a run, the likeliest cause first, from its folder alone.

    python -m sage_grpo.tools.diagnose RUN

docs/diagnosis.md explains the findings. Exit code 0: none; 1: some; 2: the folder cannot be read.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sage_grpo.flags import Parser, answer_early


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python -m sage_grpo.tools.diagnose", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    answer_early(options_of)

from sage_grpo.runs.diagnosis import Case, Finding, diagnose
from sage_grpo.runs.history import RunHistory, read_run
from sage_grpo.tools.plan import plan_of
from sage_grpo.tools.plan_model import CARDS, times

LARGE = 1e9  # parameters; the planner does not know the time of smaller models, which wait for kernel launches
DIRECTIONS = {1: "The reward rises.", 0: "The reward is flat.", -1: "The reward falls.", None: "Too early to judge."}


def findings(run: RunHistory) -> list[Finding]:
    """All findings; last that of the planner, where it knows the machine and the model."""
    case, head, found = Case(run), run.head, diagnose(run)
    card = next((card for card in CARDS if card in str(head.get("device")).lower()), "")
    plan = plan_of(case.config, head.get("ranks") or 1, card=card) if card else None
    if plan and plan.model.parameters > LARGE and plan.trained.total == head.get("trainable_parameters"):
        planned, (measured, _) = sum(times(plan).values()), case.ends("time/total")
        values = {"measured": measured, "planned": planned}
        found += [Finding("slower than planned", values)] if measured > 2 * planned else []
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        run = read_run(options_of(arguments).run)
        found = findings(run)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(DIRECTIONS[Case(run).direction], "" if found else "Nothing is wrong as far as it was recorded.")
    for number, one in enumerate(found, 1):
        print(f"{number}. {one}" + (f" Panel of report.html: {one.panel}." if one.panel else ""))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
