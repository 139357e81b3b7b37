"""Checks a configuration before it costs GPU hours: reports measurements, problems and remedies.

    python -m sage_grpo.tools.doctor --config FILE.yaml [--FLAG VALUE ...]     (any flag of post_train.py)
    python -m sage_grpo.tools.doctor --short --config FILE.yaml ...            (only the machine, in seconds)

One process acts as the first rank of the run; nothing is trained, and the run folder is not touched. At the end, all
exploration SDEs are compared on the model and the prompts. Exit code 0: no problems; 1: something is WRONG; 2: the
configuration cannot run, with the error that post_train.py would print, or the machine cannot run it.
"""

import argparse
import dataclasses
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from sage_grpo.checks import warnings
from sage_grpo.config import Config, ConfigError
from sage_grpo.flags import parse
from sage_grpo.json_files import write_json
from sage_grpo.models import device_for
from sage_grpo.parallel.ranks import Ranks, check_layout, join_ranks
from sage_grpo.runs.folder import RunFolder
from sage_grpo.tools.doctor_checks import CHECKS, Finding, judged
from sage_grpo.tools.machine_checks import examine_machine, machine_of
from sage_grpo.tools.preflight import check_samplers
from sage_grpo.train.build import assemble, rollout_sampling
from sage_grpo.train.trainer import Trainer


def options_of(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    """Parse the doctor's flags; all others go to post_train.py's parser."""
    about = "Check a configuration before it costs GPU hours. Takes all flags of post_train.py, and these:"
    parser = argparse.ArgumentParser("python -m sage_grpo.tools.doctor", description=about, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("outputs/doctor"), help="folder; default: %(default)s")
    parser.add_argument("--short", action="store_true", help="check the machine only, a line per check")
    parser.add_argument("--skip_ab", action="store_true", help="leave out the comparison of the exploration SDEs")
    parser.add_argument("--ranks", type=int, default=1, help="processes that the run will have; default: %(default)s")
    parser.add_argument("--ranks_here", type=int, help="how many of them run on this machine; default: all")
    parser.add_argument("--prompts", type=int, default=4, help="prompts to compare the SDEs on; default: %(default)s")
    parser.add_argument("--clips", type=int, default=4, help="clips per prompt compared; default: %(default)s")
    options, rest = parser.parse_known_args(arguments)
    config = parse(rest)
    for name, least in {"ranks": 1, "prompts": 1, "clips": 2}.items():
        if getattr(options, name) < least:
            raise ConfigError(f"{name} is {getattr(options, name)}; it must be at least {least}")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("the doctor is one process: start it without torchrun and pass --ranks N")
    if options.output.resolve() == Path(config.output_dir).resolve():
        raise ConfigError(f"output and output_dir are both {options.output}; the doctor stays out of the run folder")
    return options, config


def prepare(config: Config, alone: Ranks, count: int) -> tuple[Trainer, list[Finding]]:
    """A trainer for the first of `count` ranks, and early findings. An existing run folder is not an error here."""
    check_layout(count, config.sp_size, config.enable_fsdp, config.dp_replicate)
    ranks = dataclasses.replace(alone, count=count // config.sp_size, sp_size=config.sp_size, mesh=None)
    trainer = assemble(dataclasses.replace(config, overwrite=True), ranks)
    notes, c = warnings(trainer.config), trainer.config
    try:
        RunFolder(config, ranks)
    except ConfigError as error:  # post_train.py's error about the folder
        notes.append(str(error))
    size = sum(p.numel() for p in trainer.optimization.parameters.values())
    text = f"trains {size:,} numbers of {c.pretrained_model_root}, {c.dtype} on {ranks.device.type}; clips of "
    text += f"{rollout_sampling(c)}, by {c.sde_type}, eta {c.eta:g}"
    text += f"; validation: {trainer.validation.sampling}" if trainer.validation else ""
    return trainer, [Finding("config", "ok", text), *(Finding("config", "note", note) for note in notes)]


def attempt(name: str, check: Callable[[Trainer], Iterator[Finding]], trainer: Trainer) -> Iterator[Finding]:
    """The check's findings; a check that fails to finish is also WRONG."""
    try:
        yield from check(trainer)
    except (RuntimeError, ValueError) as error:
        remedy = "doctor.json has the traceback"
        if isinstance(error, torch.OutOfMemoryError):
            remedy = "lower micro_batch_size or the size of the clips, or set enable_gradient_checkpointing True"
        text = f"it ended with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        yield judged(name, False, text, remedy, traceback=traceback.format_exc())


def main(arguments: Sequence[str] | None = None) -> int:
    disable_progress_bar()  # from the text encoders
    try:
        options, config = options_of(arguments)
        if options.short:
            good = examine_machine(machine_of(config, options.ranks, options.ranks_here or options.ranks))
            return 0 if good else 2
        device = device_for(config.device, config.pretrained_model_root, config.pretrained_transformer_version)
        with join_ranks(config.start_timeout, sharded=config.enable_fsdp, device_type=device) as alone:
            trainer, findings = prepare(config, alone, options.ranks)
            return examine(options, trainer, findings)
    except (ValueError, OSError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2


def examine(options: argparse.Namespace, trainer: Trainer, findings: list[Finding]) -> int:
    """Run the checks and print their findings."""
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
    write_json(options.output / "doctor.json", {"findings": [dataclasses.asdict(finding) for finding in findings]})
    print(f"WRONG: {', '.join(wrong)}" if wrong else "All is well.", f"Numbers: {options.output / 'doctor.json'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
