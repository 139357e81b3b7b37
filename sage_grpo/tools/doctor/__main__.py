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
from collections.abc import Callable, Iterator, Sequence
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
    if options.output is None:
        options.output = run.with_name(f"{run.resolve().name}-doctor")
    if options.ranks is None:
        options.ranks = config.gpus or 1
    if options.ranks_here is None:
        options.ranks_here = options.ranks if options.short else 1

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
from sage_grpo.files.paths import check_folder, make_folder
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.runs.folder import RunFolder
from sage_grpo.tools.doctor.base_model import check_base_model
from sage_grpo.tools.doctor.check_result import NOTE, CheckResult, note, ok, run_check
from sage_grpo.tools.doctor.checks import CHECKS
from sage_grpo.tools.doctor.machine import examine_machine, machine_of
from sage_grpo.tools.doctor.samplers import check_samplers
from sage_grpo.train.build import join_run, load_trainer, rollout_sampling
from sage_grpo.train.trainer import Trainer


@answering("doctor: ")
def main(arguments: Sequence[str] | None = None) -> int:
    options, config = parse_arguments(arguments)
    if not options.short:
        check_folder(options.output, "output")
    disable_progress_bar()  # from the text encoders

    machine_results = examine_machine(machine_of(config, options.ranks, options.ranks_here))
    if any(result.is_wrong for result in machine_results):
        return 2
    if options.short:
        return 0

    with join_run(replace(config, sp_size=1, dp_replicate=1)) as alone:
        trainer = first_rank(config, alone, options.ranks)
        make_folder(options.output, "output")
        results = [*describe(trainer, config), *examine(trainer, options)]

    path = options.output / "doctor.json"
    record = {
        "machine": [asdict(result) for result in machine_results],
        "findings": [asdict(result) for result in results],
    }
    write_json(path, record)
    wrong_checks = [result.check for result in results if result.is_wrong]
    notes = sum(result.mark == NOTE for result in results)
    print(f"\n{verdict(wrong_checks, notes)}; the numbers are in {path}")
    return 1 if wrong_checks else 0


def verdict(wrong_checks: Sequence[str], notes: int) -> str:
    """The outcome of all checks in one line."""
    if wrong_checks:
        return f"WRONG: {', '.join(dict.fromkeys(wrong_checks))}"
    if notes:
        return f"All is well, with {notes} note{'s' if notes > 1 else ''}"
    return "All is well"


def first_rank(config: Config, alone: Ranks, count: int) -> Trainer:
    """The trainer of the first of `count` ranks, in one process. An existing run folder is not an error here."""
    data_parallel = count // config.sp_size
    ranks = replace(alone, dp_size=data_parallel, sp_size=config.sp_size, mesh=None)
    return load_trainer(replace(config, overwrite=True), ranks)


def describe(trainer: Trainer, config: Config) -> list[CheckResult]:
    """Print what will be trained, and notes on the configuration as it was given."""
    c = trainer.config
    parameters = sum(p.numel() for p in trainer.optimization.parameters.values())
    device = trainer.ranks.device.type
    sampling = str(rollout_sampling(c))
    text = (
        f"trains {parameters:,} parameters of {c.pretrained_model_root}, {c.dtype} on {device}; "
        f"clips of {sampling}, by {c.sde_type}, eta {c.eta:g}"
    )
    validation = str(trainer.validation.sampling) if trainer.validation else None
    if validation:
        text += f"; validation: {validation}"
    numbers = {
        "size": parameters,
        "device": device,
        "sampling": sampling,
        "validation": validation,
    }
    results = [ok("config", text, numbers=numbers)]

    results += [note("config", warning) for warning in warnings(c, trainer.ranks.world_size)]
    if trainer.reward.note:
        results.append(note("config", trainer.reward.note))
    try:
        RunFolder(config, trainer.ranks)
    except ConfigError as error:  # post_train.py's error about the folder
        results.append(note("config", str(error)))
    for result in results:
        print(result)
    return results


def examine(trainer: Trainer, options: argparse.Namespace) -> list[CheckResult]:
    """Run the checks and print their results. The samplers are compared only if nothing is WRONG before."""
    results: list[CheckResult] = []

    def run(name: str, check: Callable[[Trainer], Iterator[CheckResult]]) -> None:
        for result in run_check(name, check, trainer):
            print(result, flush=True)
            results.append(result)

    for name, check in CHECKS.items():
        run(name, check)
    if any(result.is_wrong for result in results):
        print("The model is not sampled, nor are the samplers compared, before this is repaired.")
    elif options.skip_ab:
        print("The model is not sampled, nor are the samplers compared.")
    else:
        run(
            "base model",
            partial(check_base_model, num_prompts=options.prompts, num_clips=options.clips),
        )
        compare = partial(
            check_samplers,
            num_prompts=options.prompts,
            num_clips=options.clips,
            output=options.output,
        )
        run("samplers", compare)
    return results


if __name__ == "__main__":
    sys.exit(main())
