"""Checks a configuration before it costs GPU hours: reports measurements, problems and remedies.

    python -m sage_grpo.tools.doctor --config FILE.yaml [--FLAG VALUE ...]     (any flag of post_train.py)
    python -m sage_grpo.tools.doctor --short --config FILE.yaml ...            (only the machine, in seconds)

First comes what needs no weights: this machine and the files. Then one process acts as the first rank of the run;
nothing is trained, and the run folder is not touched. At the end, all exploration SDEs are compared on the model and
the prompts. Exit code 0: no problems; 1: something is WRONG; 2: the configuration cannot run, with the error that
post_train.py would print, or the machine cannot run it.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from sage_grpo.config.command_line import answer_early, answering
from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.config.rules import warnings
from sage_grpo.tools.options import ToolParser


def parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    """Parse the doctor's flags, and all others as flags of post_train.py."""
    parser = ToolParser("python -m sage_grpo.tools.doctor", __doc__)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder for numbers and pictures (default: OUTPUT_DIR-doctor)",
    )
    parser.add_argument("--short", action="store_true", help="check only the machine")
    parser.add_argument(
        "--skip_ab", action="store_true", help="skip the comparison of the exploration SDEs"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        above=0,
        help="processes of the run (default: gpus of the configuration)",
    )
    parser.add_argument(
        "--ranks_here",
        type=int,
        metavar="N",
        above=0,
        help="processes on this machine (default: 1, or all of them with --short)",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        metavar="N",
        default=4,
        above=0,
        help="prompts to compare the SDEs on",
    )
    parser.add_argument(
        "--clips",
        type=int,
        metavar="N",
        default=4,
        above=1,
        help="clips per prompt to compare the SDEs on",
    )
    options, config = parser.parse_with_config(arguments)

    run = Path(config.output_dir)
    options.output = options.output or run.with_name(f"{run.resolve().name}-doctor")
    options.ranks = options.ranks or config.gpus or 1
    options.ranks_here = options.ranks_here or (options.ranks if options.short else 1)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("the doctor is one process: start it without torchrun and pass --ranks N")
    if options.output.resolve() == run.resolve():
        raise ConfigError(
            f"output and output_dir are both {options.output}; the doctor stays out of the run folder"
        )
    return options, config


answer_early(__name__, parse_arguments)

from transformers.utils.logging import disable_progress_bar

from sage_grpo.files.json_files import write_json
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.runs.folder import RunFolder
from sage_grpo.tools.doctor.checks import CHECKS, Finding, attempt, judged
from sage_grpo.tools.doctor.machine import examine_machine, machine_of
from sage_grpo.tools.doctor.samplers import check_samplers
from sage_grpo.train.build import assemble, join_run, rollout_sampling
from sage_grpo.train.trainer import Trainer


def prepare(config: Config, alone: Ranks, count: int) -> tuple[Trainer, list[Finding]]:
    """A trainer for the first of `count` ranks, and early findings. An existing run folder is not an error here."""
    ranks = replace(alone, count=count // config.sp_size, sp_size=config.sp_size, mesh=None)
    trainer = assemble(replace(config, overwrite=True), ranks)
    notes, c = list(warnings(trainer.config, count)), trainer.config
    try:
        RunFolder(config, ranks)
    except ConfigError as error:  # post_train.py's error about the folder
        notes.append(str(error))
    size = sum(p.numel() for p in trainer.optimization.parameters.values())
    said = {
        "sampling": str(rollout_sampling(c)),
        "validation": trainer.validation and trainer.validation.sampling,
    }
    told = judged("config", True, c=c, size=size, device=ranks.device.type, **said)
    return trainer, [told, *(judged("config.note", None, note=note) for note in notes)]


def examine(
    options: argparse.Namespace, machine: list[Finding], trainer: Trainer, findings: list[Finding]
) -> int:
    """Run the checks and print their findings; doctor.json keeps them beside those about the machine."""
    print(*findings, sep="\n")
    options.output.mkdir(parents=True, exist_ok=True)
    wrong = []
    for name, check in (CHECKS | {"samplers": partial(check_samplers, options=options)}).items():
        if name == "samplers" and (wrong or options.skip_ab):
            print(f"The samplers are not compared{' before this is repaired' if wrong else ''}.")
            break
        for finding in attempt(name, check, trainer):
            print(finding, flush=True)
            findings.append(finding)
            wrong += [finding.check] if finding.mark == "WRONG" else []
    record = {
        name: [asdict(one) for one in found]
        for name, found in (("machine", machine), ("findings", findings))
    }
    write_json(options.output / "doctor.json", record)
    print(
        f"WRONG: {', '.join(wrong)}" if wrong else "All is well.",
        f"Numbers: {options.output / 'doctor.json'}",
    )
    return 1 if wrong else 0


@answering("doctor: ")
def main(arguments: Sequence[str] | None = None) -> int:
    options, config = parse_arguments(arguments)
    disable_progress_bar()  # from the text encoders
    machine = examine_machine(machine_of(config, options.ranks, options.ranks_here))
    if any(finding.mark == "WRONG" for finding in machine):
        return 2
    if options.short:
        return 0
    with join_run(replace(config, sp_size=1, dp_replicate=1)) as alone:
        return examine(options, machine, *prepare(config, alone, options.ranks))


if __name__ == "__main__":
    sys.exit(main())
