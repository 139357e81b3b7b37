"""What a run says on the terminal: what it is at its start, and how to go on at its end."""

import shlex
import sys
from collections.abc import Mapping

import torch

from sage_grpo.config.fields import FIELDS
from sage_grpo.config.rules import warnings
from sage_grpo.models.versions import DEFAULT_VERSION
from sage_grpo.train.build import rollout_sampling
from sage_grpo.train.trainer import Trainer


def begin(trainer: Trainer) -> None:
    """Say what is about to run, and what in it does less than it seems to; all ranks call this."""
    if trainer.ranks.first:
        print(banner(trainer), flush=True)
    for text in warnings(trainer.config, trainer.ranks.world):
        trainer.ranks.log_once(text)


def banner(trainer: Trainer) -> str:
    """What is about to run, a line for each part."""
    c, ranks, validation = trainer.config, trainer.ranks, trainer.validation
    trained = sum(p.numel() for p in trainer.optimization.parameters.values())
    whole = sum(p.numel() for p in trainer.backbone.transformer.parameters())
    prompts = c.gradient_accumulation_steps * c.batch_size * ranks.count // c.num_generations
    machine = torch.cuda.get_device_name() if ranks.device.type == "cuda" else "CPU"
    method = (
        f"{c.sde_type}, eta {c.eta:g}, window {c.sde_window}"
        if trainer.algorithm.explores
        else c.algorithm
    )
    lines = {
        "run": f"{trainer.run.path}, iteration {trainer.step} of {c.max_steps}",
        "model": f"{c.pretrained_model_root}: {trained:,} of {whole:,} parameters are trained, {c.dtype}",
        "machine": f"{ranks.world} x {machine}: {ranks.count} data-parallel x {ranks.sp_size} sequence-parallel",
        "update": f"{prompts} prompts x {c.num_generations} clips of {rollout_sampling(c)}; {method}",
        "reward": f"{trainer.reward} ({', '.join(trainer.reward.rewards)})",
        "checkpoint": f"after iteration {upcoming(trainer, c.save_interval)}",
    }
    lines["run"] += f", resumed from {trainer.resumed_from.name}" if trainer.resumed_from else ""
    lines["checkpoint"] += f", or every {c.save_minutes:g} minutes" if c.save_minutes else ""
    if validation:
        now = "now and " if c.validate_at_step0 and trainer.step == 0 else ""
        clips = f"{len(validation.prompts)} clips of {validation.sampling}"
        lines["validation"] = (
            f"{now}after iteration {upcoming(trainer, c.validation_interval)}: {clips}"
        )
    return table(lines)


def upcoming(trainer: Trainer, interval: int) -> int:
    """The next iteration after which something due every `interval` of them, and at the end, is done."""
    last = trainer.config.max_steps
    return min(last, (trainer.step // interval + 1) * interval) if interval else last


def ending(trainer: Trainer) -> str:
    """Where the result is, and the command to look at it."""
    first, c = (
        (trainer.validation.prompts if trainer.validation else trainer.prompts)[0],
        trainer.config,
    )
    sample = [
        "python",
        "generate.py",
        "--checkpoint_path",
        str(trainer.run.path),
        "--prompt",
        first.text,
    ]
    if c.pretrained_model_root != FIELDS["pretrained_model_root"].default:
        sample += ["--model_path", c.pretrained_model_root]
    if c.pretrained_transformer_version != DEFAULT_VERSION:
        sample += ["--pretrained_transformer_version", c.pretrained_transformer_version]
    sample += ["--image", str(first.image.path)] if first.image else []
    checkpoint = trainer.run.checkpoints / f"step-{trainer.settled_step:06d}"
    return table({"checkpoint": str(checkpoint), "next": shlex.join(sample)})


def table(lines: Mapping[str, str]) -> str:
    """Names, bold on a terminal, and what they stand for."""
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    return "\n".join(f"{bold}{name:<12}{plain}{text}" for name, text in lines.items())
