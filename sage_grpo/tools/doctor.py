"""Checks a configuration before it costs GPU hours: what was measured, what is wrong, and the remedy.

    python -m sage_grpo.tools.doctor --config FILE.yaml [--FLAG VALUE ...]     (any flag of post_train.py)

One process plays the first rank of the run; nothing is trained, and the run folder is left alone. At the end every
exploration SDE is compared on the model and the prompts. Exit code 0: all is well; 1: something is WRONG; 2: the
configuration cannot run, with the sentence that post_train.py would say.
"""

import argparse
import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from sage_grpo.config import Config, ConfigError, parse, warnings
from sage_grpo.parallel.ranks import Ranks, join_ranks
from sage_grpo.tools import doctor_checks as checks
from sage_grpo.tools.doctor_checks import Finding, judged
from sage_grpo.tools.doctor_gradients import balance_table, check_update
from sage_grpo.tools.preflight import Comparison, compare_samplers, explanation, table, write_sheet
from sage_grpo.train.build import assemble
from sage_grpo.train.metrics import finite
from sage_grpo.train.run import Run
from sage_grpo.train.trainer import Trainer

CHECKS = {
    "batch": checks.check_batch,
    "prompts": checks.check_prompts,
    "vae": checks.check_vae,
    "reward": checks.check_reward,
    "noise": checks.check_exploration,
    "noise 0": checks.check_noise_free,
    "update": check_update,
}


def options_of(arguments: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """The doctor's own flags; the rest are those of post_train.py."""
    parser = argparse.ArgumentParser(
        "python -m sage_grpo.tools.doctor",
        description="Check a configuration before it costs GPU hours.",
        epilog="All flags of post_train.py are understood too, --config FILE.yaml among them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/doctor"), metavar="FOLDER", help="default: %(default)s"
    )
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="processes that the run will have; default: 1"
    )
    parser.add_argument("--skip_ab", action="store_true", help="leave out the comparison of the exploration SDEs")
    parser.add_argument("--prompts", type=int, default=4, metavar="N", help="of the comparison; default: %(default)s")
    parser.add_argument("--clips", type=int, default=4, metavar="N", help="of each of them; default: %(default)s")
    options, rest = parser.parse_known_args(arguments)
    config = parse(rest)
    for name, least in (("ranks", 1), ("prompts", 1), ("clips", 2)):
        if getattr(options, name) < least:
            raise ConfigError(f"{name} is {getattr(options, name)}; it must be at least {least}")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("the doctor is one process: start it without torchrun and say --ranks N")
    if options.output.resolve() == Path(config.output_dir).resolve():
        raise ConfigError(f"output and output_dir are both {options.output}; the doctor stays out of the run folder")
    return options, config


def prepare(config: Config, count: int) -> tuple[Trainer, list[Finding]]:
    """The first of `count` ranks, and what to say beforehand. A folder that holds a run is no obstacle here."""
    with join_ranks(config.start_timeout) as alone:
        ranks = dataclasses.replace(alone, count=count)
    trainer = assemble(dataclasses.replace(config, overwrite=True), ranks)
    return trainer, [Finding("config", "note", text) for text in (*warnings(trainer.config), *occupied(config, ranks))]


def occupied(config: Config, ranks: Ranks) -> list[str]:
    """What post_train.py will say about the run folder."""
    try:
        Run(config, ranks)
    except ConfigError as error:
        return [str(error)]
    return []


def summary(trainer: Trainer) -> Finding:
    c = trainer.config
    numbers = sum(p.numel() for p in trainer.optimization.parameters.values())
    what = f"a LoRA of rank {c.lora_r}" if c.use_lora else "all weights"
    text = f"trains {what} ({numbers:,} numbers) of {c.pretrained_model_root}, {c.dtype} on {trainer.ranks.device.type}"
    text += f"; clips of {c.num_frames} x {c.height} x {c.width} by {c.sde_type}, eta {c.eta:g}"
    text += f", {c.num_sampling_steps} steps, shift {c.timestep_shift:g}, guidance {c.guidance_scale:g}"
    return Finding("config", "ok", text)


def examine(trainer: Trainer) -> Iterator[Finding]:
    """All checks; one that cannot be finished is WRONG too."""
    for name, check in CHECKS.items():
        try:
            yield from check(trainer)
        except torch.OutOfMemoryError:
            remedy = "lower micro_batch_size or the size of the clips, or set enable_gradient_checkpointing True"
            yield judged(name, False, "the memory of the device is not enough", remedy)
        except (RuntimeError, ValueError) as error:
            text = f"it ended with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            yield judged(name, False, text, "doctor.json has the traceback", traceback=traceback.format_exc())


def pre_flight(trainer: Trainer, options: argparse.Namespace) -> tuple[Comparison, Finding]:
    """The comparison of the samplers, its sheet, and whether the configured one gives training something to learn."""
    c = trainer.config
    found = compare_samplers(trainer, options.prompts, options.clips)
    write_sheet(options.output / "samplers.png", found, trainer)
    row = next(row for row in found.rows if row["sde"] == c.sde_type)
    failing = row["failed"] > c.max_reward_failures * row["clips"]
    text = f"with {c.sde_type} the reward varies by {row['spread']:.3g} inside a group"
    text += f"; {row['failed']} of {row['clips']} rewards failed" if row["failed"] else ""
    remedy = "equal rewards teach nothing: raise eta, or choose another reward or other prompts"
    if failing:
        remedy = f"more failures than max_reward_failures allows: {row['first_error'] or 'clips could not be decoded'}"
    return found, judged("samplers", row["spread"] > 0 and not failing, text, remedy)


def show(comparison: Comparison, trainer: Trainer, sheet: Path) -> None:
    c, count = trainer.config, len(comparison.prompts)
    print(f"\nEvery sampler on {count} prompts x {comparison.group} clips at eta {c.eta:g}; * is the configured one")
    print("(--prompts and --clips take more of them, which narrows the errors):\n")
    print(f"{table(comparison, c.sde_type)}\n\n{explanation(comparison)}\n")
    print(f"{sheet} shows the first clips, one row per sampler.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    disable_progress_bar()  # of the text encoders
    try:
        options, config = options_of(sys.argv[1:] if arguments is None else arguments)
        trainer, notes = prepare(config, options.ranks)
    except (ValueError, FileNotFoundError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    findings, rows = [], []
    for finding in chain([summary(trainer)], notes, examine(trainer)):
        findings.append(finding)
        print(finding, flush=True)
        if finding.check == "balance":
            print(balance_table(finding))
    if any(finding.mark == "WRONG" for finding in findings):
        print("The samplers are not compared before this is repaired.")
    elif not options.skip_ab:
        comparison, finding = pre_flight(trainer, options)
        show(comparison, trainer, options.output / "samplers.png")
        print(finding)
        rows, findings = comparison.rows, [*findings, finding]
    record = {"findings": [dataclasses.asdict(finding) for finding in findings], "samplers": rows}
    (options.output / "doctor.json").write_text(json.dumps(finite(record), indent=1) + "\n")
    wrong = [finding.check for finding in findings if finding.mark == "WRONG"]
    print(f"WRONG: {', '.join(wrong)}" if wrong else "All is well.", f"Numbers: {options.output / 'doctor.json'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
