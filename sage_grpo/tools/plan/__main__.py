"""Estimates a run's memory, time and checkpoints before it starts, without its weights.

    python -m sage_grpo.tools.plan --config FILE.yaml --gpus N --gpu_memory GB [--FLAG VALUE ...]
    ... --vary num_frames 49 81 121        one line per value of a flag (or of gpus) instead

Takes every flag of post_train.py. A model folder that does not exist stands for the full-size model. Exit code 0: the
run fits; 1: it does not, and remedies are printed; 2: the configuration cannot run.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sage_grpo.config.command_line import answer_early, answering
from sage_grpo.config.fields import Config
from sage_grpo.config.parse import from_values
from sage_grpo.tools.options import ToolParser


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
        default=80.0,
        above=0,
        help="memory of each GPU",
    )
    parser.add_argument(
        "--gpu",
        choices=["h200", "h100", "a100", "4090"],
        default="h200",
        help="GPU model; rates were measured on an h200 and are scaled for the others",
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
    return options, config


answer_early(__name__, parse_arguments)

from sage_grpo.tools.plan.memory import (
    checkpoint_bytes,
    disk_bytes,
    export_bytes,
    fits,
    memory,
    peak,
    snapshot_bytes,
)
from sage_grpo.tools.plan.model import times, validation_time, volumes
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.tools.plan.remedies import remedies
from sage_grpo.tools.templating import render
from sage_grpo.train.build import held_out_prompts
from sage_grpo.train.validation import validation_sampling

GB = 1e9  # bytes
# what the templates compute of a plan
SHOWN = {
    of.__name__: of
    for of in (memory, peak, fits, times, volumes, export_bytes, disk_bytes, snapshot_bytes)
}
SHOWN |= {of.__name__: of for of in (checkpoint_bytes, validation_time, validation_sampling)}


@answering("plan: ")
def main(arguments: Sequence[str] | None = None) -> int:
    options, config = parse_arguments(arguments)
    gpu_bytes, assumed = options.gpu_memory * GB, (options.text_tokens, options.gpu)
    if options.vary:
        name, *values = options.vary
        configs = {
            value: from_values(asdict(config), {name.replace("-", "_"): value}) for value in values
        }
        gpus = {value: c.gpus if name == "gpus" else options.gpus for value, c in configs.items()}
        rows = [(value, plan_of(c, gpus[value], *assumed)) for value, c in configs.items()]
        print(render("plan_vary.txt", **SHOWN, rows=rows, name=name, gpu_bytes=gpu_bytes).rstrip())
        return 0
    plan = plan_of(config, options.gpus, *assumed)
    exists, clips = (
        Path(plan.config.pretrained_model_root).is_dir(),
        len(held_out_prompts(plan.config)),
    )
    about = {"plan": plan, "exists": exists, "clips": clips, "remedies": remedies(plan, gpu_bytes)}
    print(render("plan.txt", **SHOWN, **about, price=options.price, gpu_bytes=gpu_bytes).rstrip())
    return 0 if fits(plan, gpu_bytes) else 1


if __name__ == "__main__":
    sys.exit(main())
