"""Why is my reward flat? Prints what is wrong with a run, from its folder alone, in the order in which to fix it.

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

from sage_grpo.escape import plain
from sage_grpo.plugins import is_trusted
from sage_grpo.runs.case import Case
from sage_grpo.runs.diagnosis import Finding, Rule, diagnose
from sage_grpo.runs.history import about, read_run
from sage_grpo.tools.plan.calibration import GPU_MODELS
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.tools.plan.times import times

LARGE = (
    1e9  # parameters; smaller models wait for kernel launches, whose time the planner does not know
)
DIRECTIONS = {
    1: "The reward rises.",
    0: "The reward is flat.",
    -1: "The reward falls.",
    None: "Too early to judge.",
}


def slower_than_planned(case: Case) -> str | None:
    """Judged where the planner knows the machine and the model."""
    head = case.run.head
    device = str(head.get("device")).lower()
    gpu_model = next((name for name in GPU_MODELS if name in device), None)
    if gpu_model is None or not is_trusted(case.config.sde_type):  # a plan builds the sampler
        return None
    try:
        plan = plan_of(case.config, head.get("ranks") or 1, gpu_model=gpu_model)
    except (ValueError, OSError):  # a configuration or a model folder that is not that of the run
        return None
    if plan.model.parameters < LARGE or plan.trained.total != head.get("trainable_parameters"):
        return None

    measured, _ = case.early_and_late("time/total")
    planned = sum(times(plan).values())
    if measured > 2 * planned:
        return f"an iteration takes {measured:.3g} s; the plan was {planned:.3g} s"
    return None


SLOWER_THAN_PLANNED = Rule(
    name="slower than planned",
    evidence=slower_than_planned,
    cause="Training is slow; the reward itself may be fine.",
    remedy=(
        "compare the phases of report.html with those of tools.plan;"
        " --compile True, --gather_for_rollout True."
    ),
    remedy_if_set="compare the phases of report.html with those of tools.plan.",
    panel="Time per iteration",
)


@answering("")
def main(arguments: Sequence[str] | None = None) -> int:
    folder = parse_arguments(arguments).run
    with about(folder):
        run = read_run(folder)
        case = Case(run)
        findings = diagnose(run)
        if evidence := slower_than_planned(case):
            findings.append(Finding(SLOWER_THAN_PLANNED, evidence, case.config))
        verdict = DIRECTIONS[case.direction]

    if not findings:
        verdict += " Nothing is wrong as far as it was recorded."
    for sentence in run.break_sentences:
        print(plain(sentence))
    print(verdict)
    for number, finding in enumerate(findings, 1):
        panel = finding.rule.panel
        print(f"{number}. {finding}" + (f" Panel of report.html: {panel}." if panel else ""))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
