"""Checks a configuration before it costs GPU hours: reports measurements, problems and remedies.

    python -m sage_grpo.tools.doctor --config FILE.yaml [--FLAG VALUE ...]     (any flag of post_train.py)
    python -m sage_grpo.tools.doctor --short --config FILE.yaml ...            (only the machine, in seconds)

First comes what needs no weights: this machine and the files. Then one process acts as the first rank of the run;
nothing is trained, and the run folder is not touched. At the end, all exploration SDEs are compared on the model and
the prompts. Exit code 0: no problems; 1: something is WRONG; 2: the configuration cannot run, with the error that
post_train.py would print, or the machine cannot run it.
"""

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from sage_grpo.config import Config, ConfigError, warnings
from sage_grpo.flags import answer_early, answering
from sage_grpo.tools.options import ToolParser


def options_of(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    """Parse the doctor's flags; all others go to post_train.py's parser."""
    options, config = ToolParser("doctor", __doc__).parse_with_config(arguments)
    run = Path(config.output_dir)
    options.output = options.output or run.with_name(f"{run.resolve().name}-doctor")
    options.ranks = options.ranks or config.gpus or 1
    options.ranks_here = options.ranks_here or (options.ranks if options.short else 1)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("the doctor is one process: start it without torchrun and pass --ranks N")
    if options.output.resolve() == run.resolve():
        raise ConfigError(f"output and output_dir are both {options.output}; the doctor stays out of the run folder")
    return options, config


answer_early(__name__, options_of)

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from sage_grpo.algo.sde import SDES, Schedule, build_schedule, flow_sigmas
from sage_grpo.json_files import write_json
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.plugins import resolved
from sage_grpo.runs.clips import contact_sheet, thumbnails
from sage_grpo.runs.folder import RunFolder
from sage_grpo.tools.doctor_checks import CHECKS, Finding, attempt, judged
from sage_grpo.tools.machine_checks import examine_machine, machine_of
from sage_grpo.tools.templating import render
from sage_grpo.train.build import assemble, join_run, rollout_sampling
from sage_grpo.train.rollout import MicroBatch, plan_micro_batches, prompt_positions
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.validation import gold_columns

SHEET_CLIPS, SHEET_FRAMES = 3, 4  # in one row of the contact sheet


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
    said = {"sampling": str(rollout_sampling(c)), "validation": trainer.validation and trainer.validation.sampling}
    told = judged("config", True, c=c, size=size, device=ranks.device.type, **said)
    return trainer, [told, *(judged("config.note", None, note=note) for note in notes)]


@dataclass(frozen=True)
class Arm:
    """Results of one sampler, from the same noise as the others. P prompts with G clips each."""

    noise: float  # injected energy
    clips: list[Tensor | None]  # P * G, grouped by prompt
    columns: dict[str, Tensor]  # (P, G): reward, scores, gold metrics; NaN on failure
    errors: list[str]  # from the reward

    def numbers(self, ode: "Arm") -> dict[str, float]:
        """One row of the table. Clips of one prompt are correlated, so standard errors count prompts."""
        means = {name: values.nanmean(1) for name, values in self.columns.items()}
        reward = means.pop("reward")
        row = {"noise": self.noise, "failed": int((~self.columns["reward"].isfinite()).sum())}
        for name, values in (("reward", reward), ("vs ode", reward - ode.columns["reward"].nanmean(1))):
            known = values[values.isfinite()]
            error = known.std().item() / math.sqrt(len(known)) if len(known) > 1 else math.nan
            row |= {name: known.mean().item(), f"{name} +-": error}
        row["spread"] = (self.columns["reward"] - reward[:, None]).square().nanmean(1).sqrt().nanmean().item()
        return row | {name: values.nanmean().item() for name, values in means.items()}


def check_samplers(trainer: Trainer, options: argparse.Namespace) -> Iterator[Finding]:
    """A table and a contact sheet of all samplers; whether the configured one gives a training signal."""
    c, sheet = trainer.config, options.output / "samplers.png"
    positions = prompt_positions(trainer.step, options.prompts, len(trainer.prompts), c.seed)
    micro = math.gcd(options.clips, len(trainer.micro_batches()[0]))  # at most as many at once as in training
    micro_batches = plan_micro_batches(positions, options.clips, options.clips * len(positions), 0, micro)
    sigmas, arms, schedules, left_out = flow_sigmas(c.num_sampling_steps, c.timestep_shift), {}, {}, []
    own = c.sde_type if trainer.algorithm.explores else c.algorithm  # the latter samples without an SDE
    for name in dict.fromkeys(["ode", *SDES, own]):
        try:
            schedules[name] = None if name == c.algorithm else build_schedule(resolved(name), sigmas, c.eta)
        except ValueError as error:  # cps rejects an eta above 1
            left_out.append(f"{name} is left out: {error}")
        else:
            arms[name] = sample(trainer, name, schedules[name], micro_batches, options.clips)
    transformer = trainer.backbone.transformer
    if lossy := transformer.in_8_bits:
        transformer.in_8_bits = None
        arms["exact"] = sample(trainer, "exact", schedules[own], micro_batches, options.clips)
        transformer.in_8_bits = lossy
    rows = {name: arm.numbers(arms["ode"]) for name, arm in arms.items()}
    write_sheet(sheet, arms, rows, own, [trainer.prompts[position].text for position in positions], c)
    arm, row = arms[own], rows[own]
    failing = row["failed"] if row["failed"] > c.max_reward_failures * len(arm.clips) else 0
    shown = render("samplers.txt", rows=rows, configured=own, left_out=left_out)
    said = {"failing": failing, "error": [*arm.errors, "clips are not finite"][0], "spread": row["spread"]}
    said |= {"sheet": str(sheet), "rows": rows, "left_out": left_out, "own": own}
    yield judged("samplers", row["spread"] > 0 and not failing, shown, c, **said)
    if lossy:
        yield compare_exact(arm, arms["exact"])


def compare_exact(arm: Arm, exact: Arm) -> Finding:
    """What lossy steps outside the window do to the same clips and their rewards."""
    change, error, spread = map(arm.numbers(exact).get, ("vs ode", "vs ode +-", "spread"))
    both = [(a, b) for a, b in zip(arm.clips, exact.clips, strict=True) if a is not None and b is not None]
    pixels = math.sqrt(sum((a.float() - b).square().mean().item() for a, b in both) / max(1, len(both)))
    good = abs(change) < max(2 * error, 0.1 * spread)
    return judged("lossy steps", good, pixels=pixels, change=change, error=error, spread=spread)


def sample(trainer: Trainer, name: str, schedule: Schedule | None, batches: Sequence[MicroBatch], group: int) -> Arm:
    """Clips from a sampler within the trainer's window for this iteration, or without an SDE; decoded and scored."""
    c, clips, asked = trainer.config, [], []
    schedule = schedule and schedule.window(trainer.windows.steps).to(trainer.ranks.device)
    for micro_batch in tqdm(batches, name, unit="batch", leave=False):  # one at a time: only clips are kept
        clips += trainer.decode(trainer.roll_out([micro_batch], schedule))
        asked += [trainer.prompts[position] for position, _ in micro_batch]
    scores = trainer.reward.score(clips, asked, c.fps)
    columns = {"reward": scores.total} | scores.named | gold_columns(trainer.gold, clips, asked)
    columns = {name: values.view(-1, group) for name, values in columns.items()}
    noise = schedule.std.double().square().sum().item() if schedule else 0.0
    return Arm(noise, clips, columns, scores.errors)


def write_sheet(path: Path, arms: Mapping[str, Arm], rows: Mapping, own: str, prompts: list[str], c: Config) -> None:
    """Write one row of frames per sampler; a column shares prompt and noise across rows. Failed clips are black."""
    black = torch.zeros(c.num_frames, c.height, c.width, 3, dtype=torch.uint8)
    strips, labels = [], [" | ".join(prompts[:SHEET_CLIPS])]
    for name, arm in arms.items():
        firsts = arm.clips[:: len(arm.clips) // len(prompts)][:SHEET_CLIPS]
        strips.append(np.concatenate([thumbnails(black if clip is None else clip, SHEET_FRAMES) for clip in firsts]))
        numbers = ", ".join(f"{key} {rows[name][key]:.3f}" for key in ("noise", "reward", "spread"))
        labels.append(f"{name}{' (configured)' if name == own else ''}: {numbers}")
    heading = np.full_like(strips[0][:, :1], 255)  # a white line under the prompts
    contact_sheet(path, [heading, *strips], labels)


def examine(options: argparse.Namespace, machine: list[Finding], trainer: Trainer, findings: list[Finding]) -> int:
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
    record = {name: [asdict(one) for one in found] for name, found in (("machine", machine), ("findings", findings))}
    write_json(options.output / "doctor.json", record)
    print(f"WRONG: {', '.join(wrong)}" if wrong else "All is well.", f"Numbers: {options.output / 'doctor.json'}")
    return 1 if wrong else 0


@answering("doctor: ")
def main(arguments: Sequence[str] | None = None) -> int:
    options, config = options_of(arguments)
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
