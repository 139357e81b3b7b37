"""Does the diagnosis name a fault that is really there? Injects faults into short runs and prints the verdicts.

    python -m research.studies.diagnosis_check --output outputs/diagnosis     all faults, minutes on a CPU
    python -m research.studies.diagnosis_check --world embedded --only "eta 4" healthy-1
                                                                              the embedded model: minutes per run

Every run goes through the real trainer. In the small world, clips are walls that should be orange, and the policy is a
network of 219 parameters (tests/trivial_backbone.py); the embedded world is assets/tiny. The faults are in
research/studies/faults.py; a healthy run is made with 8 seeds. Finished runs are kept and not repeated; `--write FILE`
puts the table into a page.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from research.studies.faults import BY_WORLD, HEALTHY, OTHER_ALGORITHMS, fault_of
from sage_grpo.config.fields import Config
from sage_grpo.config.parse import from_values
from sage_grpo.models.registry import BACKBONES
from sage_grpo.rewards.registry import REWARDS
from sage_grpo.runs.clips import read_listing
from sage_grpo.runs.diagnosis import Case, diagnose
from sage_grpo.runs.history import read_run
from sage_grpo.train.build import build_trainer, join_run
from sage_grpo.train.guards import TrainingError
from tests.trivial_backbone import TinyDenoiser

ROOT = Path(__file__).parents[2]
SEEDS = range(1, 9)  # of healthy runs
FEW_SEEDS = range(1, 4)  # of healthy runs of the other algorithms
TEXTS = ("a wall", "a door", "a roof", "a floor")
ORANGE = (0.9, 0.5, 0.1)  # what all of them should be
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
PLACES = ("output_dir", "pretrained_model_root", "prompt_cache")
RECORDED = (  # how the keys of the metrics begin that the diagnosis reads
    "kind", "step", "ranks", "count", "updates", "lr", "signal/", "kl/", "time/", "reward/total", "reward/std",
    "reward/error", "reward/group_std", "reward/failed", "reward/flat_groups", "policy/clip_", "policy/grad_",
    "policy/ratio_max",
)  # fmt: skip


class Walls:
    """A reward: is the clip orange on average, and is it even?"""

    names = ("color", "calm")

    def check(self, prompts: list[str]) -> None:
        pass

    def score(self, clips: list[Tensor], prompts: list[str], fps: float) -> dict[str, Tensor]:
        """Scores (B,) of uint8 clips (F, H, W, 3)."""
        pixels = torch.stack([clip.flatten(0, 2).double() / 255 for clip in clips])  # (B, FHW, 3)
        return {
            "color": -(pixels.mean(1) - torch.tensor(ORANGE)).abs().mean(1),
            "calm": -pixels.std(1).mean(1),
        }


def small_model(folder: Path) -> None:
    """Write a policy that paints gray walls, with a little noise, whatever the prompt says."""
    (folder / "transformer").mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text('{"_class_name": "TrivialPipeline"}')
    (folder / "prompts_train.txt").write_text("\n".join(TEXTS) + "\n")
    rows = [f"{text},{seed}" for seed in range(6) for text in TEXTS]
    (folder / "prompts_valid.csv").write_text("prompt,seed\n" + "\n".join(rows) + "\n")

    torch.manual_seed(0)
    model = TinyDenoiser()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(600):
        noise = torch.randn(64, 1, 4, 4, 3)
        clips = 0.2 * torch.randn(64, 1, 4, 4, 3)
        sigma = torch.rand(64, 1, 1, 1, 1)
        velocity = model((1 - sigma) * clips + sigma * noise, sigma, torch.rand(1))
        optimizer.zero_grad()
        (velocity - noise + clips).square().mean().backward()
        optimizer.step()
    save_file(model.state_dict(), folder / "transformer" / "diffusion_pytorch_model.safetensors")


def run_folder(output: Path, world: str, name: str) -> Path:
    return output / world / re.sub(r"\W+", "-", name)


def healthy_runs(world: str) -> list[str]:
    """Names of the healthy runs: of grpo, and in the small world a few of the other algorithms."""
    names = [f"{HEALTHY}-{seed}" for seed in SEEDS]
    if world == "small":
        names += [f"{HEALTHY}-{name}-{seed}" for name in OTHER_ALGORITHMS for seed in FEW_SEEDS]
    return names


def healthy_flags(name: str) -> dict[str, Any]:
    """What distinguishes a healthy run from the others."""
    _, *algorithm, seed = name.split("-")
    return {"seed": int(seed), "algorithm": algorithm[0] if algorithm else "grpo"}


def train(output: Path, world: str, name: str) -> None:
    """Make one run in this process; `healthy-3` is a healthy one with seed 3, `healthy-awm-3` the same of awm."""
    torch.set_num_threads(1)
    BACKBONES["TrivialPipeline"] = "tests.trivial_backbone:Trivial"
    REWARDS["walls"] = lambda setup: Walls()
    fault = fault_of(world, name)
    folder = run_folder(output, world, name)

    values = SHARED | WORLDS[world] | {"output_dir": str(folder)} | dict(fault.flags)
    if world == "small":
        model = output / "model"
        values["pretrained_model_root"] = str(model)
        values["validation_prompts"] = str(model / "prompts_valid.csv")
    else:
        values["prompt_cache"] = str(output / "prompts")
    values["batch_size"] //= fault.ranks
    if name.startswith(HEALTHY):
        values |= healthy_flags(name)

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
    """Make a run in a process of its own, or in one per rank."""
    ranks = fault_of(world, name).ranks
    if ranks == 1:
        context = multiprocessing.get_context("fork")
        process = context.Process(target=train, args=(output, world, name))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{name} failed with exit code {process.exitcode}")
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", "-m", "research.studies.diagnosis_check"]
    command += ["--world", world, "--output", str(output), "--train", name]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


def rounded(value: Any) -> Any:
    """Round all floats inside a JSON value to three significant digits."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.3g}") if type(value) is float else value


def record(folder: Path) -> dict[str, Any]:
    """What the diagnosis reads of a run, small enough to be kept with the tests."""
    lines = []
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        short = {key: value for key, value in line.items() if key.startswith(RECORDED)}
        if "per_step" in line:
            kept = ("grad_v", "kl_anchor", "count")
            short["per_step"] = {key: line["per_step"][key] for key in kept}
        if "schedule" in line:
            short["schedule"] = line["schedule"]
        lines.append(short)

    clips: dict[str, list[Any]] = {}
    for file in sorted(folder.glob("validation/*/clips.json")):
        clips[file.parent.name] = [
            (clip["prompt"], clip["seed"], clip["scores"]["total"]) for clip in read_listing(file)
        ]

    default = yaml.safe_load(Config().to_yaml())
    config = yaml.safe_load((folder / "config.yaml").read_text())
    changed = {
        flag: value
        for flag, value in config.items()
        if value != default[flag] and "prompts" not in flag and flag not in PLACES
    }
    status = json.loads((folder / "status.json").read_text())
    return {"config": changed, "status": status, "lines": rounded(lines), "clips": rounded(clips)}


def read_records(file: Path) -> dict[str, dict[str, Any]]:
    """Recorded runs by world and name."""
    return json.loads(gzip.decompress(file.read_bytes()))


def write_records(file: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Write recorded runs by world and name; the same runs give the same bytes."""
    text = json.dumps(runs, separators=(",", ":"))
    file.write_bytes(gzip.compress(text.encode(), mtime=0))


def restore(recorded: dict[str, Any], folder: Path) -> Path:
    """Make a run folder from its record."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(recorded["config"]))
    (folder / "status.json").write_text(json.dumps(recorded["status"]))
    lines = [json.dumps(line) + "\n" for line in recorded["lines"]]
    (folder / "metrics.jsonl").write_text("".join(lines))
    for name, clips in recorded["clips"].items():
        (folder / "validation" / name).mkdir(parents=True)
        listing = [
            {"file": "0.mp4", "prompt": prompt, "seed": seed, "scores": {"total": total}}
            for prompt, seed, total in clips
        ]
        (folder / "validation" / name / "clips.json").write_text(json.dumps(listing))
    return folder


def table(output: Path, world: str, names: Sequence[str]) -> str:
    """A row per run: the first two findings, the evidence for the injected fault, and its rank among the findings."""
    lines = [
        "| fault | first finding | second | evidence | rank of the fault |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        run = read_run(run_folder(output, world, name))
        findings = diagnose(run)
        found_names = [finding.name for finding in findings]
        first, second = [*found_names, "-", "-"][:2]

        wanted = fault_of(world, name).finding
        evidence = ""
        if wanted in found_names:
            place = found_names.index(wanted)
            verdict = str(place + 1)
            evidence = findings[place].evidence
        elif wanted:
            verdict = "**not found**"
        elif not findings:
            verdict = "none, as it should"
        elif Case(run).direction == 1:
            verdict = "**false alarm**"
        else:
            verdict = "no fault injected, but the reward is flat"
        lines.append(f"| {name} | {first} | {second} | {evidence} | {verdict} |")
    return "\n".join(lines)


def write_table(page: Path, world: str, text: str) -> None:
    """Replace the table of a world in a page, between its marks."""
    begin = f"<!-- {world}: begin -->"
    end = f"<!-- {world}: end -->"
    head, _, rest = page.read_text().partition(begin)
    _, _, tail = rest.partition(end)
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--world", choices=WORLDS, default="small")
    add("--only", nargs="+", metavar="NAME", help="runs to make (default: all)")
    add("--output", type=Path, default=Path("outputs/diagnosis"), help="folder of the runs")
    add("--write", type=Path, metavar="FILE", help="page whose table of this world is replaced")
    add("--record", type=Path, metavar="FILE",
        help="file for what the diagnosis reads of these runs")  # fmt: skip
    add("--train", help=argparse.SUPPRESS)  # one run, in this process
    args = parser.parse_args()
    if args.train:
        train(args.output, args.world, args.train)
        return

    names = args.only or [*BY_WORLD[args.world], *healthy_runs(args.world)]
    if args.world == "small" and not (args.output / "model" / "transformer").is_dir():
        small_model(args.output / "model")
    for name in names:
        if not (run_folder(args.output, args.world, name) / "done").is_file():
            print(name, flush=True)
            start(args.output, args.world, name)

    verdicts = table(args.output, args.world, names)
    print(verdicts)
    if args.record:
        runs = read_records(args.record) if args.record.is_file() else {}
        for name in names:
            recorded = record(run_folder(args.output, args.world, name))
            runs.setdefault(args.world, {})[name] = recorded
        write_records(args.record, runs)
    if args.write:
        write_table(args.write, args.world, verdicts)


if __name__ == "__main__":
    main()
