"""Estimates a run's memory, time and checkpoints before it starts, without its weights.

    python -m sage_grpo.tools.plan --config FILE.yaml --gpus N --gpu NAME [--FLAG VALUE ...]
    ... --vary num_frames 49 81 121        one line per value of a flag (or of gpus) instead

Takes every flag of post_train.py. A model folder that does not exist stands for the full-size model. Exit code 0: the
run fits; 1: it does not, and remedies are printed; 2: the configuration cannot run.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

from sage_grpo.config.command_line import answer_early, answering
from sage_grpo.config.fields import Config
from sage_grpo.config.parse import from_values
from sage_grpo.plugins import trust
from sage_grpo.tools.options import ToolParser
from sage_grpo.tools.plan.calibration import GPU_MODELS, MEASURED_ON

GB = 1e9  # bytes
DEFAULT_MEMORY = 80.0  # GB, of the cards that most recipes are written for


def parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    """Parse this tool's flags, and all others as flags of post_train.py."""
    parser = ToolParser("python -m sage_grpo.tools.plan", __doc__)
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        above=0,
        help="processes of the run (default: gpus of the configuration, or 1)",
    )
    parser.add_argument(
        "--gpu_memory",
        type=float,
        metavar="GB",
        above=0,
        help=f"memory of each GPU (default: that of --gpu, or {DEFAULT_MEMORY:g} without it)",
    )
    parser.add_argument(
        "--gpu",
        choices=list(GPU_MODELS),
        help="GPU model, with its memory; rates were measured on an h200 and are scaled for the others",
    )
    parser.add_argument(
        "--price",
        type=float,
        metavar="X",
        above=0,
        help="price of one GPU-hour, in any currency",
    )
    parser.add_argument(
        "--text_tokens",
        type=int,
        metavar="N",
        default=150,
        above=0,
        help="tokens of a prompt",
    )
    parser.add_argument(
        "--vary",
        nargs="+",
        metavar="WORD",
        help="FLAG VALUE VALUE ...: compare values of a flag, or of gpus",
    )
    options, config = parser.parse_with_config(arguments)

    options.gpus = options.gpus or config.gpus or 1
    if options.gpu_memory is None:
        options.gpu_memory = GPU_MODELS[options.gpu].memory / GB if options.gpu else DEFAULT_MEMORY
    options.gpu = options.gpu or MEASURED_ON
    return options, config


answer_early(__name__, parse_arguments)

from sage_grpo.tools.plan.memory import fits
from sage_grpo.tools.plan.model import Plan
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.tools.plan.remedies import remedies
from sage_grpo.tools.plan.summary import compare, summarize
from sage_grpo.train.inputs import validation_requests


@answering("plan: ")
def main(arguments: Sequence[str] | None = None) -> int:
    options, config = parse_arguments(arguments)
    gpu_bytes = options.gpu_memory * GB
    if options.vary:
        flag, *values = options.vary
        plans = {value: varied_plan(config, options, flag, value) for value in values}
        print(compare(flag, plans, gpu_bytes))
        return 0

    plan = plan_of(config, options.gpus, options.text_tokens, options.gpu)
    text = summarize(
        plan,
        validation_clips=len(validation_requests(plan.config)),
        gpu_bytes=gpu_bytes,
        price=options.price,
        changes=remedies(plan, gpu_bytes),
    )
    print(text)
    return 0 if fits(plan, gpu_bytes) else 1


def varied_plan(config: Config, options: argparse.Namespace, flag: str, value: str) -> Plan:
    """The plan with another value of a flag of post_train.py, or of gpus."""
    flag = flag.replace("-", "_")
    changed = from_values(asdict(config), {flag: value})
    trust(value)  # it is from the command line
    gpus = changed.gpus if flag == "gpus" else options.gpus
    return plan_of(changed, gpus, options.text_tokens, options.gpu)


if __name__ == "__main__":
    sys.exit(main())
