"""Why is my reward flat? Prints what is wrong with a run, from its folder alone, in the order in which to fix it.

    python -m sage_grpo.tools.diagnose RUN

docs/diagnosis.md explains the findings. Exit code 0: none; 1: some; 2: the folder cannot be read; 3: none yet, but it
is too early to tell.
"""

import argparse
import math
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

from sage_grpo.escape import terminal_text
from sage_grpo.plugins import is_trusted
from sage_grpo.runs.case import MIN_FOR_LATE, MIN_FOR_TREND, Case
from sage_grpo.runs.diagnosis import Finding, Rule, diagnose
from sage_grpo.runs.history import about, read_run
from sage_grpo.tools.plan.calibration import GPU_MODELS
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.tools.plan.times import times

# parameters; smaller models wait for kernel launches, whose time the planner does not know
LARGE = 1e9
DIRECTIONS = {
    1: "The reward rises.",
    0: "The reward is flat.",
    -1: "The reward falls.",
    None: "Too early to tell whether the reward rises.",
}
TOO_EARLY = 3  # exit code
NO_FAULT_BUT_FLAT = (
    " No fault that a run shows explains it. Ask the reward whether it notices known damage (scripts/audit_reward.py),"
    " and the model whether it samples as it should (python -m sage_grpo.tools.doctor), then give it more iterations."
)


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


def duration(seconds: float) -> str:
    """A duration in the unit that suits it."""
    if not math.isfinite(seconds):
        return "an unknown time"
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def waiting_for(case: Case) -> str:
    """What is still needed to judge the run, and when it will be there; empty if everything could be judged."""
    logged = len(case.run.full_lines)
    is_directed = case.direction is not None
    if is_directed and logged >= MIN_FOR_LATE:
        return ""

    if is_directed:
        needs = f"{MIN_FOR_LATE} logged iterations, to compare late with early ones"
        iteration = case.iteration_of_line(MIN_FOR_LATE)
    else:
        needs = f"{MIN_FOR_TREND} logged iterations or two validations of the same clips"
        iteration = case.iteration_of_line(MIN_FOR_TREND)
        # a validation is paired with an earlier one
        if case.validation_clips and case.next_validation is not None:
            iteration = min(iteration, case.next_validation)
    start = f" There are {logged} logged iterations and {len(case.run.validations)} validations; it needs {needs}"

    max_steps = case.config.max_steps
    if iteration > max_steps:
        return f"{start}, which a run of {max_steps} does not reach: raise --max_steps, or lower --log_interval."
    seconds = (iteration - case.run.iterations) * case.seconds_per_iteration
    return (
        f"{start}. Ask again after iteration {iteration}, {duration(seconds)} of training from now."
    )


def verdict_of(case: Case, has_findings: bool) -> str:
    """The direction of the reward, and how far the absence of findings can be trusted."""
    verdict = DIRECTIONS[case.direction]
    waiting = waiting_for(case)
    if has_findings:
        return verdict + (waiting if case.direction is None else "")
    if waiting:
        return f"{verdict} No fault so far, but too early to say that there is none.{waiting}"
    if case.direction == 0:
        return verdict + NO_FAULT_BUT_FLAT
    if case.direction == -1:
        return f"{verdict} No fault that a run shows explains it: look at the clips, and resume from a good step."
    return f"{verdict} Nothing is wrong as far as it was recorded."


@answering("")
def main(arguments: Sequence[str] | None = None) -> int:
    folder = parse_arguments(arguments).run
    with about(folder):
        run = read_run(folder)
        case = Case(run)
        findings = diagnose(run)
        if evidence := slower_than_planned(case):
            findings.append(Finding(SLOWER_THAN_PLANNED, evidence, case.config))
        verdict = verdict_of(case, has_findings=bool(findings))
        is_too_early = bool(waiting_for(case))

    for sentence in run.break_sentences:
        print(terminal_text(sentence))
    print(verdict)
    for number, finding in enumerate(findings, 1):
        panel = finding.rule.panel
        where = f" Panel of report.html: {panel}." if panel else ""
        print(
            terminal_text(f"{number}. {finding}{where}")
        )  # it quotes the errors and names of a reward
    if findings:
        return 1
    return TOO_EARLY if is_too_early else 0


if __name__ == "__main__":
    sys.exit(main())
