"""What a run says on the terminal: what it is at its start, and how to go on at its end."""

import os
import select
import shlex
import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path

import torch

from sage_grpo.config.fields import FIELDS
from sage_grpo.config.rules import warnings
from sage_grpo.escape import terminal_text
from sage_grpo.files.json_files import printable
from sage_grpo.models.versions import DEFAULT_VERSION
from sage_grpo.train.build import rollout_sampling
from sage_grpo.train.trainer import Trainer

PATIENCE = 30.0  # seconds to wait for an answer


def begin(trainer: Trainer) -> None:
    """Say what is about to run, and what in it does less than it seems to; all ranks call this."""
    if trainer.ranks.is_first:
        print(banner(trainer), flush=True)
    for text in warnings(trainer.config, trainer.ranks.world_size):
        trainer.ranks.log_once(text)
    if trainer.reward is not None and trainer.reward.note:
        trainer.ranks.log_once(trainer.reward.note)


def banner(trainer: Trainer) -> str:
    """What is about to run, a line for each part."""
    c = trainer.config
    ranks = trainer.ranks
    trained = sum(p.numel() for p in trainer.optimization.parameters.values())
    total = sum(p.numel() for p in trainer.backbone.transformer.parameters())
    machine = torch.cuda.get_device_name() if ranks.device.type == "cuda" else "CPU"
    num_prompts = c.gradient_accumulation_steps * c.batch_size * ranks.dp_size // c.num_generations
    chosen = ""
    if c.group_trained < c.num_generations:
        chosen = f", the best and worst {c.group_trained} trained"
    method = c.algorithm
    if trainer.algorithm.explores:
        method = f"{c.sde_type}, eta {c.eta:g}, window {c.sde_window}"

    lines = {
        "run": f"{trainer.run.path}, iteration {trainer.step} of {c.max_steps}",
        "model": f"{c.pretrained_model_root}: {trained:,} of {total:,} parameters are trained, {c.dtype}",
        "machine": f"{ranks.world_size} x {machine}: {ranks.dp_size} data-parallel x {ranks.sp_size} sequence-parallel",
        "update": f"{num_prompts} prompts x {c.num_generations} clips of {rollout_sampling(c)}{chosen}; {method}",
        "reward": f"{trainer.reward} ({', '.join(trainer.reward.rewards)})",
        "checkpoint": f"after iteration {upcoming(trainer, c.save_interval)}",
    }
    if trainer.resumed_from:
        lines["run"] += f", resumed from {trainer.resumed_from.name}"
    if c.save_minutes:
        lines["checkpoint"] += f", or every {c.save_minutes:g} minutes"
    if trainer.validation:
        now = "now and " if c.validate_at_step0 and trainer.step == 0 else ""
        clips = f"{len(trainer.validation.requests)} clips of {trainer.validation.sampling}"
        iteration = upcoming(trainer, c.validation_interval)
        lines["validation"] = f"{now}after iteration {iteration}: {clips}"
    return table(lines)


def upcoming(trainer: Trainer, interval: int) -> int:
    """The next iteration after which something due every `interval` of them, and at the end, is done."""
    last = trainer.config.max_steps
    if not interval:
        return last
    return min(last, (trainer.step // interval + 1) * interval)


def ending(trainer: Trainer) -> str:
    """Where the result is, the command to sample from it, and last the page to look at."""
    c = trainer.config
    checkpoint = trainer.run.checkpoints / f"step-{trainer.settled_step:06d}"
    if not checkpoint.is_dir():
        return table({"checkpoint": f"none, as max_steps is {c.max_steps}"})

    requests = trainer.validation.requests if trainer.validation else trainer.requests
    request = requests[0]
    command = ["python", "generate.py", "--checkpoint_path", str(trainer.run.path)]
    command += ["--prompt", request.text]
    # what was gained in the steps of the run may not show in others
    steps = trainer.validation.sampling.num_steps if trainer.validation else c.num_sampling_steps
    if steps != trainer.backbone.sampling.num_steps:
        command += ["--num_inference_steps", str(steps)]
    if trainer.validation and c.validation_solver != FIELDS["validation_solver"].default:
        command += ["--solver", c.validation_solver]
    if c.pretrained_model_root != FIELDS["pretrained_model_root"].default:
        command += ["--model_path", c.pretrained_model_root]
    if c.pretrained_transformer_version != DEFAULT_VERSION:
        command += ["--pretrained_transformer_version", c.pretrained_transformer_version]
    if request.image:
        command += ["--image", str(request.image.path)]
    lines = {"checkpoint": str(checkpoint), "next": shlex.join(command)}
    report = trainer.run.path / "report.html"
    if report.is_file():
        lines["report"] = str(report)
    return table(lines)


def offer_report(page: Path) -> None:
    """In a terminal on a desktop, ask whether to open the report in a browser; nobody else is asked or waited for."""
    if not (page.is_file() and sys.stdin.isatty() and sys.stdout.isatty() and has_desktop()):
        return
    print(f"Open {page} in a browser? [Y/n] ", end="", flush=True)
    answered, _, _ = select.select([sys.stdin], [], [], PATIENCE)
    answer = sys.stdin.readline().strip().lower() if answered else "n"
    if not answered:
        print()
    if answer in ("", "y", "yes"):
        try:
            webbrowser.open(page.resolve().as_uri())
        except Exception as error:  # the run is done, whatever is wrong with the browser
            print(f"note: no browser could be opened ({printable(error)})", file=sys.stderr)


def has_desktop() -> bool:
    """Whether a browser would have a screen to appear on."""
    if sys.platform == "darwin":
        return "SSH_CONNECTION" not in os.environ
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def table(lines: Mapping[str, str]) -> str:
    """Names, bold on a terminal, and what they stand for."""
    bold, normal = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    return "\n".join(
        f"{bold}{name:<12}{normal}{terminal_text(text)}" for name, text in lines.items()
    )
