"""Does the diagnosis name a fault that is really there? Injects faults into short runs and prints the verdicts.

    python -m research.studies.diagnosis_check --output outputs/diagnosis                 (all faults, minutes on a CPU)
    python -m research.studies.diagnosis_check --world embedded --only healthy kl_strong  (the embedded model: minutes per run)

Every run goes through the real trainer. In the small world, clips are walls that should be orange, and the policy is a
network of 219 parameters (tests/trivial_backbone.py); the embedded world is assets/tiny. A healthy run is made with 8
seeds. Finished runs are kept and not repeated; `--write FILE` puts the table into a page.
"""

import argparse
import copy
import gzip
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from sage_grpo.config.fields import Config
from sage_grpo.config.parse import from_values
from sage_grpo.models.registry import BACKBONES
from sage_grpo.rewards.registry import REWARDS
from sage_grpo.runs.clips import read_listing
from sage_grpo.runs.diagnosis import Case, diagnose
from sage_grpo.runs.history import read_run
from sage_grpo.train import optimization
from sage_grpo.train.build import build_trainer, join_run
from sage_grpo.train.guards import TrainingError
from sage_grpo.train.trainer import Trainer
from tests.trivial_backbone import TinyDenoiser

ROOT = Path(__file__).parents[2]
SEEDS = range(1, 9)  # of healthy runs
TEXTS, GOAL = (
    ("a wall", "a door", "a roof", "a floor"),
    (0.9, 0.5, 0.1),
)  # all of them should be orange
SHARED = {
    "report_to": "none", "save_interval": 0, "validate_at_step0": True, "validation_interval": 0, "overwrite": True,
    "validation_videos": 0, "enable_gradient_checkpointing": False, "dtype": "fp32", "sde_window": "all_but_last",
    "guidance_scale": 1.0, "eta": 0.7, "num_sampling_steps": 4, "validation_num_inference_steps": 4,
    "num_generations": 8, "kl_schedule": "fixed", "update_ref_model_step": 5,
}  # fmt: skip
WORLDS: dict[str, dict[str, Any]] = {
    "small": {
        "reward_model": "walls", "reward_weights": {"color": 1.0, "calm": 0.5}, "max_steps": 32, "batch_size": 64,
        "num_generations": 32,
        "learning_rate": 2e-3, "kl_weight": 0.03, "num_frames": 1, "height": 4, "width": 4,
        "validate_video_length": 1, "validation_fixed_size": "4x4", "num_sampling_steps": 8,
        "validation_num_inference_steps": 8,
    },
    "embedded": {
        "pretrained_model_root": str(ROOT / "assets/tiny"), "reward_model": "shapes", "num_frames": 5, "height": 24,
        "width": 24, "validate_video_length": 5, "validation_fixed_size": "24x24", "num_validation_prompts": 24,
        "max_steps": 20, "batch_size": 24, "learning_rate": 5e-4, "kl_weight": 0.3,
    },
}  # fmt: skip


class Walls:
    """A reward: is the clip orange on average, and is it even?"""

    names = ("color", "calm")

    def check(self, prompts: list[str]) -> None:
        pass

    def score(
        self, clips: list[torch.Tensor], prompts: list[str], fps: float
    ) -> dict[str, torch.Tensor]:
        pixels = torch.stack(
            [clip.flatten(0, 2).double() / 255 for clip in clips]
        )  # (B, pixels, 3)
        return {
            "color": -(pixels.mean(1) - torch.tensor(GOAL)).abs().mean(1),
            "calm": -pixels.std(1).mean(1),
        }


def small_model(folder: Path) -> Path:
    """A policy that paints gray walls, with a little noise, whatever the prompt says."""
    (folder / "transformer").mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text('{"_class_name": "TrivialPipeline"}')
    (folder / "prompts_train.txt").write_text("\n".join(TEXTS) + "\n")
    rows = [f"{text},{seed}" for seed in range(6) for text in TEXTS]
    (folder / "prompts_valid.csv").write_text("prompt,seed\n" + "\n".join(rows) + "\n")
    torch.manual_seed(0)
    model = TinyDenoiser()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(600):
        noise, clips, sigma = (
            torch.randn(64, 1, 4, 4, 3),
            0.2 * torch.randn(64, 1, 4, 4, 3),
            torch.rand(64, 1, 1, 1, 1),
        )
        found = model((1 - sigma) * clips + sigma * noise, sigma, torch.rand(1))
        optimizer.zero_grad()
        (found - noise + clips).square().mean().backward()
        optimizer.step()
    save_file(model.state_dict(), folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return folder


Inject = Callable[[Trainer], None]


@dataclass(frozen=True)
class Fault:
    """Flags that differ from a healthy run, or code that breaks it, and the finding that should name it."""

    finding: str
    flags: dict[str, Any] = field(default_factory=dict)
    inject: Inject = lambda trainer: None
    ranks: int = 1


def rescored(
    change: Callable[[torch.Tensor, Trainer, Any], torch.Tensor], validation: bool = False
) -> Inject:
    """Passes the scores of every call through `change(values, trainer, clips)`."""

    def inject(trainer: Trainer) -> None:
        reward = next(iter(trainer.reward.rewards.values()))
        broken, score = copy.copy(reward), reward.score
        broken.score = lambda clips, *rest: {
            k: change(v, trainer, clips) for k, v in score(clips, *rest).items()
        }
        trainer.reward = copy.copy(trainer.reward)
        trainer.reward.rewards = dict.fromkeys(trainer.reward.rewards, broken)
        if validation:
            trainer.validation.reward = trainer.reward

    return inject


CHANCE = torch.Generator().manual_seed(0)


def sometimes(share: float) -> bool:
    return float(torch.rand((), generator=CHANCE)) < share


def unavailable(values: torch.Tensor, *_: Any) -> torch.Tensor:
    if sometimes(0.1):
        raise ConnectionError("the server did not answer")
    return values


def constant(values: torch.Tensor, trainer: Trainer, clips: Any) -> torch.Tensor:
    return torch.where(torch.tensor([int(clip.sum()) % 7 == 0 for clip in clips]), 0.0, values)


def delayed(values: torch.Tensor, trainer: Trainer, clips: Any) -> torch.Tensor:
    time.sleep(0.1 * (trainer.step > trainer.config.max_steps // 2))
    return values


def brightness(values: torch.Tensor, trainer: Trainer, clips: Any) -> torch.Tensor:
    return torch.stack([clip.double().mean() / 255 for clip in clips])


def rugged(values: torch.Tensor, trainer: Trainer, clips: Any) -> torch.Tensor:
    """Adds a part that depends on the clip alone but on nothing that can be learned."""
    return values + 0.1 * torch.stack([torch.sin(1e3 * clip.double().sum()) for clip in clips])


def other_arithmetic(trainer: Trainer) -> None:
    velocity = trainer.backbone.velocity
    trainer.backbone.velocity = lambda *args: velocity(*args) * (1 + 1e-5 * torch.is_grad_enabled())


def no_gradient(trainer: Trainer) -> None:
    clip = trainer.optimization.clip
    trainer.optimization.clip = lambda: math.nan if trainer.step % 5 == 4 else clip()


def foreign_anchor(trainer: Trainer) -> None:
    for value in trainer.anchor.values.values():
        value += 0.3 * value.std(correction=0) * torch.randn(value.shape, generator=CHANCE)
    trainer.anchor.refresh_every = None


def never_copied(trainer: Trainer) -> None:
    optimization.copy_into = lambda *_: None


def never_refreshed(trainer: Trainer) -> None:
    trainer.anchor.refresh_every = None


def lone_weights(trainer: Trainer) -> None:
    if trainer.ranks.rank == 1:
        with torch.no_grad():
            next(iter(trainer.optimization.parameters.values())).add_(1e-3)


def lone_prompts(trainer: Trainer) -> None:
    if trainer.ranks.rank == 1:
        trainer.prompts = [*trainer.prompts[1:], trainer.prompts[0]]
        trainer.fingerprints = trainer.fingerprints | {"training prompts": "others"}


HEALTHY, PLACES = "healthy", ("output_dir", "pretrained_model_root", "prompt_cache")
FAULTS = {
    "1 prompt x 4 clips per update, rugged reward": Fault(
        "too few clips", {"batch_size": 4, "num_generations": 4}, rescored(rugged, True)
    ),
    "reward depends on the prompt only": Fault(
        "flat groups", inject=rescored(lambda v, *_: torch.zeros_like(v), True)
    ),
    "reward with noise ten times its spread": Fault(
        "noisy reward",
        inject=rescored(lambda v, *_: v + 0.1 * torch.randn(v.shape, generator=CHANCE), True),
    ),
    "eta 0.005": Fault("too little exploration", {"eta": 0.005}),
    "eta 4": Fault("too much exploration", {"eta": 4.0}),
    "noise in the last step": Fault("noise in the clips", {"sde_window": "all", "eta": 1.0}),
    "learning rate x 50": Fault("learning rate too high", {"learning_rate": 0.1}),
    "learning rate / 10,000": Fault("learning rate too low", {"learning_rate": 2e-7}),
    "KL weight 3000, fixed anchor": Fault(
        "KL too strong", {"kl_weight": 3000.0, "use_moving_KL": False}
    ),
    "KL weight 1e-5, learning rate x 25": Fault(
        "KL without effect", {"kl_weight": 1e-5, "learning_rate": 0.05}
    ),
    "clip range 1e-8, 7 updates per rollout": Fault(
        "clipped", {"clip_range": 1e-8, "updates_per_rollout": 7}
    ),
    "7 updates per rollout, learning rate x 25, larger clips": Fault(
        "clipped on one side",
        {
            "updates_per_rollout": 7,
            "learning_rate": 5e-2,
            "eta": 0.4,
            "num_frames": 2,
            "height": 16,
            "width": 16,
            "validate_video_length": 2,
            "validation_fixed_size": "16x16",
        },
    ),
    "equalizer off": Fault(
        "one step dominates", {"use_grad_balancing": False, "num_sampling_steps": 12}
    ),
    "weights of one rank differ": Fault("ranks differ", inject=lone_weights, ranks=2),
    "prompts of one rank differ": Fault("ranks differ", inject=lone_prompts, ranks=2),
    "anchor of another model": Fault("wrong anchor", inject=foreign_anchor),
    "anchor is never refreshed": Fault("wrong anchor", inject=never_refreshed),
    "anchor counts refreshes, copies nothing": Fault("wrong anchor", inject=never_copied),
    "a fifth of the reward calls fails": Fault(
        "rewards fail", {"max_reward_failures": 1.0}, rescored(unavailable)
    ),
    "a seventh of the rewards is 0 instead of failed": Fault(
        "rewards repeat", inject=rescored(constant)
    ),
    "averaged weights, decay 0.9999": Fault("validation unlike training", {"ema_decay": 0.9999}),
    "training runs other arithmetic": Fault("first ratio", inject=other_arithmetic),
    "adam_eps 1": Fault("gradient below eps", {"adam_eps": 1.0}),
    "bf16 master weights, learning rate 1e-5": Fault(
        "weights too coarse",
        {"enable_fsdp": True, "master_weight_type": "bf16", "learning_rate": 1e-5},
    ),
    "reward pays for white clips": Fault(
        "variety collapsed", {"learning_rate": 2e-2, "max_steps": 48}, rescored(brightness, True)
    ),
    "every fifth gradient is not finite": Fault("not finite", inject=no_gradient),
    "reward slows down": Fault("slow", inject=rescored(delayed)),
}
HASTY = {
    "max_steps": 10,
    "num_validation_prompts": 8,
}  # what shows in every iteration needs no long run
EMBEDDED = {
    "1 prompt x 4 clips per update": Fault(
        "too few clips", {"batch_size": 4, "num_generations": 4}
    ),
    "KL weight 3000, fixed anchor": FAULTS["KL weight 3000, fixed anchor"],
    "reward depends on the prompt only": replace(
        FAULTS["reward depends on the prompt only"], flags=HASTY
    ),
    "reward with noise ten times its spread": Fault(
        "noisy reward",
        HASTY,
        rescored(lambda v, *_: v + 5 * torch.randn(v.shape, generator=CHANCE), True),
    ),
    "eta 0.005": Fault("too little exploration", HASTY | {"eta": 0.005}),
    "eta 4": Fault("too much exploration", HASTY | {"eta": 4.0}),
    "noise in the last step": Fault(
        "noise in the clips", HASTY | {"sde_window": "all", "eta": 2.0}
    ),
    "learning rate x 50": Fault("learning rate too high", {"learning_rate": 0.025}),
    "learning rate / 10,000": Fault("learning rate too low", {"learning_rate": 5e-8}),
    "KL weight 1e-5, learning rate x 10": Fault(
        "KL without effect", {"kl_weight": 1e-5, "learning_rate": 5e-3}
    ),
    "clip range 1e-8, 3 updates per rollout": Fault(
        "clipped", HASTY | {"clip_range": 1e-8, "updates_per_rollout": 3}
    ),
    "equalizer off": Fault(
        "one step dominates", HASTY | {"use_grad_balancing": False, "num_sampling_steps": 12}
    ),
    "weights of one rank differ": Fault(
        "ranks differ", HASTY | {"batch_size": 16}, lone_weights, ranks=2
    ),
    "prompts of one rank differ": Fault(
        "ranks differ", HASTY | {"batch_size": 16}, lone_prompts, ranks=2
    ),
    "anchor of another model": Fault("wrong anchor", HASTY, foreign_anchor),
    "anchor is never refreshed": Fault("wrong anchor", HASTY, never_refreshed),
    "anchor counts refreshes, copies nothing": Fault(
        "wrong anchor", {"update_ref_model_step": 2}, never_copied
    ),
    "a fifth of the reward calls fails": Fault(
        "rewards fail", HASTY | {"max_reward_failures": 1.0}, rescored(unavailable)
    ),
    "a seventh of the rewards is 0 instead of failed": Fault(
        "rewards repeat", {"max_steps": 18}, rescored(constant)
    ),
    "averaged weights, decay 0.9999": Fault(
        "validation unlike training", {"ema_decay": 0.9999, "learning_rate": 2e-3, "max_steps": 40}
    ),
    "training runs other arithmetic": Fault("first ratio", HASTY, other_arithmetic),
    "adam_eps 1": Fault("gradient below eps", HASTY | {"adam_eps": 1.0}),
    "bf16 master weights, learning rate 1e-5": Fault(
        "weights too coarse",
        HASTY | {"enable_fsdp": True, "master_weight_type": "bf16", "learning_rate": 1e-5},
    ),
    "every fifth gradient is not finite": Fault("not finite", HASTY, no_gradient),
}
BY_WORLD = {"small": FAULTS, "embedded": EMBEDDED}


def run_folder(output: Path, world: str, name: str) -> Path:
    return output / world / re.sub(r"\W+", "-", name)


def train(output: Path, world: str, name: str) -> None:
    """One run; `healthy-3` is a healthy one with seed 3."""
    torch.set_num_threads(1)
    BACKBONES["TrivialPipeline"] = "tests.trivial_backbone:Trivial"
    REWARDS["walls"] = lambda setup: Walls()
    fault, folder = BY_WORLD[world].get(name, Fault("")), run_folder(output, world, name)
    values = SHARED | WORLDS[world] | {"output_dir": str(folder)} | fault.flags
    if world == "small":
        model = output / "model"
        values |= {
            "pretrained_model_root": str(model),
            "validation_prompts": str(model / "prompts_valid.csv"),
        }
    else:
        values["prompt_cache"] = str(output / "prompts")
    values["batch_size"] //= fault.ranks
    if name.startswith(HEALTHY):
        values["seed"] = int(name.split("-")[1])
    config = from_values(values)
    with join_run(config) as ranks:
        trainer = build_trainer(config, ranks)
        trainer.gold = trainer.validation.gold = None  # the oracle is slow
        fault.inject(trainer)
        try:
            trainer.train()
        except TrainingError as error:
            print(error)
        trainer.run.close()
    (folder / "done").touch()


def start(output: Path, world: str, name: str) -> None:
    """Make a run in a process of its own, or in several."""
    count = BY_WORLD[world].get(name, Fault("")).ranks
    if count == 1:
        process = multiprocessing.get_context("fork").Process(
            target=train, args=(output, world, name)
        )
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{name} failed with exit code {process.exitcode}")
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    words = [
        "-m",
        "research.studies.diagnosis_check",
        "--world",
        world,
        "--output",
        str(output),
        "--train",
        name,
    ]
    subprocess.run(
        [sys.executable, *launcher, *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
    )


KEPT = (
    "kind", "step", "ranks", "count", "updates", "lr", "signal/", "kl/", "time/", "reward/total", "reward/std",
    "reward/error", "reward/group_std", "reward/failed", "reward/flat_groups", "policy/clip_", "policy/grad_",
    "policy/ratio_max",
)  # fmt: skip


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return (
        [*map(rounded, value)]
        if isinstance(value, list)
        else float(f"{value:.3g}")
        if type(value) is float
        else value
    )


def record(folder: Path) -> dict[str, Any]:
    """What the diagnosis reads of a run, small enough to be kept with the tests."""
    lines = []
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        steps = (
            {"per_step": {key: line["per_step"][key] for key in ("grad_v", "kl_anchor")}}
            if "per_step" in line
            else {}
        )
        schedule = {"schedule": line["schedule"]} if "schedule" in line else {}
        lines.append(
            {key: value for key, value in line.items() if key.startswith(KEPT)} | steps | schedule
        )
    clips: dict[str, list[Any]] = {}
    for file in sorted(folder.glob("validation/*/clips.json")):
        clips[file.parent.name] = [
            (one["prompt"], one["seed"], one["scores"]["total"]) for one in read_listing(file)
        ]
    default, config = (
        yaml.safe_load(Config().to_yaml()),
        yaml.safe_load((folder / "config.yaml").read_text()),
    )
    changed = {
        k: v
        for k, v in config.items()
        if v != default[k] and "prompts" not in k and k not in PLACES
    }
    status = json.loads((folder / "status.json").read_text())
    return {"config": changed, "status": status, "lines": rounded(lines), "clips": rounded(clips)}


def read_records(file: Path) -> dict[str, dict[str, Any]]:
    """Recorded runs by world and name."""
    return json.loads(gzip.decompress(file.read_bytes()))


def restore(recorded: dict[str, Any], folder: Path) -> Path:
    """A run folder from its record."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(recorded["config"]))
    (folder / "status.json").write_text(json.dumps(recorded["status"]))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in recorded["lines"])
    )
    for name, clips in recorded["clips"].items():
        (folder / "validation" / name).mkdir(parents=True)
        listing = [
            {"file": "0.mp4", "prompt": text, "seed": n, "scores": {"total": total}}
            for text, n, total in clips
        ]
        (folder / "validation" / name / "clips.json").write_text(json.dumps(listing))
    return folder


def table(output: Path, world: str, names: list[str]) -> str:
    lines = [
        "| fault | first finding | second | evidence | rank of the fault |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        run = read_run(run_folder(output, world, name))
        found = diagnose(run)
        alarm = (
            "**false alarm**"
            if Case(run).direction == 1
            else "no fault injected, but the reward is flat"
        )
        wanted = BY_WORLD[world].get(name, Fault("")).finding
        ranks = [i for i, finding in enumerate(found, 1) if finding.name == wanted]
        first, second = [finding.name for finding in found[:2]] + ["-"] * (2 - len(found[:2]))
        evidence = next((finding.evidence for finding in found if finding.name == wanted), "")
        verdict = (
            ranks[0]
            if ranks
            else "**not found**"
            if wanted
            else alarm
            if found
            else "none, as it should"
        )
        lines.append(f"| {name} | {first} | {second} | {evidence} | {verdict} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", choices=WORLDS, default="small")
    parser.add_argument("--only", nargs="+", help="runs to make; default: all")
    parser.add_argument("--output", type=Path, default=Path("outputs/diagnosis"))
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="page whose table of this world is replaced"
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="file for what the diagnosis reads of these runs",
    )
    parser.add_argument("--train", help=argparse.SUPPRESS)  # one run, in this process
    args = parser.parse_args()
    if args.train:
        return train(args.output, args.world, args.train)
    names = args.only or [*BY_WORLD[args.world], *(f"{HEALTHY}-{seed}" for seed in SEEDS)]
    if args.world == "small" and not (args.output / "model" / "transformer").is_dir():
        small_model(args.output / "model")
    for name in names:
        if not (run_folder(args.output, args.world, name) / "done").is_file():
            print(name, flush=True)
            start(args.output, args.world, name)
    found = table(args.output, args.world, names)
    print(found)
    if args.record:
        kept = read_records(args.record) if args.record.is_file() else {}
        kept[args.world] = {
            name: record(run_folder(args.output, args.world, name)) for name in names
        }
        args.record.write_bytes(
            gzip.compress(json.dumps(kept, separators=(",", ":")).encode(), mtime=0)
        )
    if args.write:
        marks = [f"<!-- {args.world}: {end} -->" for end in ("begin", "end")]
        head, _, rest = args.write.read_text().partition(marks[0])
        args.write.write_text(f"{head}{marks[0]}\n{found}\n{marks[1]}{rest.partition(marks[1])[2]}")


if __name__ == "__main__":
    main()
