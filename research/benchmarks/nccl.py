"""Several ranks on one GPU, connected by real NCCL over the loopback: agreement, memory, the launcher, a killed rank.

    bash research/benchmarks/nccl_one_gpu.sh python -m research.benchmarks.nccl --scratch /tmp/nccl \\
        --output research/benchmarks/results/DATE-nccl-h200.md

Times say nothing about several GPUs: all ranks share one, and sockets are slow. The parts:

    agree     the embedded model in fp32, three iterations, in several layouts against one process
    models    waits for the random models that are written meanwhile
    link      GB/s between ranks
    full2     the full-size transformer on 2 ranks: LoRA, sp 2, FSDP2
    full4     the same on 4 ranks, dp 2 x sp 2
    recipe    run_post_train.sh with configs/hunyuan15_8gpu.yaml: 8 ranks, all weights, sp 2, FSDP2, fewer layers
    kill      the same, with a rank killed in a rollout
"""

import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from research.benchmarks.nccl_page import page
from research.benchmarks.parts import (
    ALL_STEPS,
    ROOT,
    PartError,
    Program,
    Results,
    about,
    begin,
    metrics,
    python,
    recorded,
)
from sage_grpo.config.parse import parse
from sage_grpo.models.shards import open_shards
from sage_grpo.models.weights import open_folder
from sage_grpo.tools.plan.memory import memory
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.tools.plan.times import volumes

NAMES = ("agree", "models", "link", "full2", "full4", "recipe", "kill")
TINY = ROOT / "assets" / "tiny"
# the parts that need each random model
USERS = {
    "reward": ("full2", "full4", "recipe", "kill"),
    "recipe": ("recipe", "kill"),
    "full": ("full2", "full4"),
}
LIMITS = {
    "agree": 150,
    "models": 150,
    "link": 60,
    "full2": 150,
    "full4": 190,
    "recipe": 190,
    "kill": 220,
}
PROMPTS = "A red boat crosses a quiet lake.\nA dog runs along the beach in the rain.\n"


@dataclass(frozen=True)
class Layout:
    """Ranks of a run of the embedded model, those of them that are data-parallel, and flags."""

    ranks: int
    dp: int
    flags: str = ""


LAYOUTS = {
    "one process": Layout(ranks=1, dp=1),
    "one process, again": Layout(ranks=1, dp=1),
    "2 ranks: dp 2": Layout(ranks=2, dp=2),
    "2 ranks: sp 2": Layout(ranks=2, dp=1, flags="--sp_size 2"),
    "4 ranks: dp 4": Layout(ranks=4, dp=4),
    "4 ranks: FSDP2, dp 2 x sp 2": Layout(4, 2, "--sp_size 2 --enable_fsdp True"),
    "4 ranks: HSDP, 2 replicas of 2 shards": Layout(4, 4, "--enable_fsdp True --dp_replicate 2"),
}
VALIDATION = "--report_to none --validate_at_step0 False --validation_num_inference_steps 1 --validation_videos 0 "
# With the default eps, a gradient that is all rounding moves its weight as far as any other.
AGREE = (
    f"--config configs/tiny_cpu.yaml --max_steps 3 --log_interval 1 --adam_eps 1e-8 {VALIDATION}"
)
FULL = (
    "--config configs/hunyuan15_1gpu_lora.yaml --sp_size 2 --num_generations 2 --guidance_scale 1 "
    f"{ALL_STEPS} "
    "--num_sampling_steps 4 --timestep_fraction 0.25 --num_frames 17 --height 352 --width 624 --compile False "
    f"--max_steps 2 --validate_video_length 5 --validation_fixed_size 64x64 {VALIDATION}"
)
RECIPE = (
    f"{ALL_STEPS} --gather_for_rollout False --num_generations 4 "
    "--batch_size 1 --guidance_scale 1 --num_sampling_steps 2 --timestep_fraction 0.5 --num_frames 9 --height 128 "
    "--width 224 --compile False --max_steps 3 --save_interval 1 --keep_checkpoints 1 --validate_video_length 5 "
    f"--validation_fixed_size 64x64 {VALIDATION}"
)
# What a rehearsal on the CPU changes.
SMALL = "--device cpu --num_frames 5 --height 16 --width 16 --validation_fixed_size 16x16"
MOMENTS = ("rollout", "decode", "anchor", "update")
COMPARED = ("reward/total", "policy/loss", "policy/grad_norm", "kl/anchor")


@dataclass(frozen=True)
class Sizes:
    """What differs between the benchmark and its rehearsal."""

    models: Mapping[str, str]  # flags of random_model.py for each folder
    most_ranks: int  # of the layouts of the embedded model
    clips: int  # of its iterations
    link_ranks: int
    link_bytes: int
    recipe_ranks: int
    agree_flags: str = ""
    full_flags: str = ""
    recipe_flags: str = ""


GPU = Sizes(
    models={"reward": "--tiny --reward", "recipe": "--layers 2", "full": ""},
    most_ranks=4,
    clips=16,
    link_ranks=4,
    link_bytes=300_000_000,
    recipe_ranks=8,
)
CPU = Sizes(
    models={
        "reward": "--tiny --reward --device cpu",
        "recipe": "--tiny --layers 1 --device cpu",
        "full": "--tiny --device cpu",
    },
    most_ranks=2,
    clips=4,
    # nine frames: the reward of assets/tiny samples eight
    agree_flags="--num_generations 2 --num_sampling_steps 2 --num_frames 9 --height 16 --width 16",
    link_ranks=2,
    link_bytes=1_000_000,
    recipe_ranks=2,
    full_flags=SMALL,
    recipe_flags=f"{SMALL} --batch_size 2 --num_generations 2",
)


class Ranks:
    """The programs of this benchmark, and what they leave in the scratch folder."""

    def __init__(self, scratch: Path, sizes: Sizes) -> None:
        self.scratch = scratch
        self.sizes = sizes
        self.logs = scratch / "logs"
        self.writer: Program | None = None  # of the random models

        self.prompts = scratch / "prompts.txt"
        self.prompts.write_text(PROMPTS)
        self.valid = scratch / "valid.txt"
        self.valid.write_text(PROMPTS.partition("\n")[0] + "\n")
        lines = (TINY / "prompts_train.txt").read_text().splitlines()
        self.captions = scratch / "captions.txt"  # prompts of the embedded model
        self.captions.write_text("\n".join(lines[:4]) + "\n")

    def write_models(self, wanted: Collection[str]) -> None:
        """Begin to write the models that some of the wanted parts need; the smallest comes first."""
        commands = []
        for name, flags in self.sizes.models.items():
            folder = self.scratch / name
            needed = any(part in wanted for part in USERS[name])
            if needed and not (folder / "model_index.json").is_file():
                words = ["-m", "research.benchmarks.random_model", "--output", folder]
                commands.append(shlex.join(python(*words, *flags.split())))
        script = " && ".join(commands) or "true"
        self.writer = Program(["bash", "-c", script], self.logs / "models.log")

    def models(self, limit: float) -> Results:
        """Wait for the random models."""
        self.writer.wait(limit)
        return {"lines": [line for line in self.writer.tail().splitlines() if " GB in " in line]}

    def common(self, name: str) -> list[str]:
        """Flags of the runs with a random model."""
        words = ["--pretrained_model_root", self.scratch / name]
        words += ["--reward_path", self.scratch / "reward" / "VideoReward"]
        words += ["--train_prompts", self.prompts, "--validation_prompts", self.valid]
        return [str(word) for word in words]

    def torchrun(
        self, ranks: int, name: str, words: Sequence[object], **settings: object
    ) -> Program:
        """Start a program on some ranks, with its phases recorded; settings: environment variables."""
        phases = self.scratch / "phases" / name
        shutil.rmtree(phases, ignore_errors=True)
        launcher = python()
        if ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone"]
            launcher += ["--nproc_per_node", str(ranks)]
        return Program([*launcher, *words], self.logs / f"{name}.log", PHASES=phases, **settings)

    # agree

    def agree(self, limit: float) -> Results:
        """All layouts at once: they are small."""
        end = time.monotonic() + limit
        flags = f"{AGREE} {self.sizes.agree_flags}".split()
        flags += ["--train_prompts", self.captions, "--validation_prompts", self.captions]
        runs: dict[str, Path] = {}
        programs: dict[str, Program] = {}
        for name, layout in LAYOUTS.items():
            if layout.ranks > self.sizes.most_ranks:
                continue
            run = self.scratch / f"agree{len(runs)}"
            shutil.rmtree(run, ignore_errors=True)
            words = ["post_train.py", *flags, *layout.flags.split(), "--output_dir", run]
            words += ["--batch_size", self.sizes.clips // layout.dp]
            runs[name] = run
            # fp32 throughout: cuDNN may use TF32 for convolutions, depending on their sizes
            programs[name] = self.torchrun(
                layout.ranks, run.name, words, OMP_NUM_THREADS=1, NVIDIA_TF32_OVERRIDE=0
            )

        layouts: dict[str, Any] = {}
        try:
            for name, program in programs.items():
                try:
                    program.wait(max(1.0, end - time.monotonic()))
                    layouts[name] = compared(runs["one process"], runs[name], TINY)
                except (PartError, OSError, ValueError, KeyError) as error:
                    layouts[name] = {
                        "error": f"{type(error).__name__}: {error}",
                        "seconds": time.time() - program.begun,
                    }
        finally:
            for program in programs.values():
                program.kill()
        return {"layouts": layouts, "tf32": False}

    # link

    def link(self, limit: float) -> Results:
        """GB/s between ranks."""
        size = self.sizes.link_bytes
        output = self.scratch / "link.json"
        words = ["-m", "research.benchmarks.link_speed", "--output", output, "--bytes", size]
        self.torchrun(self.sizes.link_ranks, "link", words).wait(limit)
        return {"speeds": json.loads(output.read_text()), "bytes": size}

    # full size

    def full(self, ranks: int, limit: float) -> Results:
        """LoRA on the full-size model, two ranks per clip."""
        name = f"full{ranks}"
        clips = str(2 // (ranks // 2))  # of each data-parallel rank
        flags = [*FULL.split(), "--batch_size", clips, "--micro_batch_size", clips]
        flags += [*self.common("full"), *self.sizes.full_flags.split()]
        run = self.scratch / name
        shutil.rmtree(run, ignore_errors=True)
        program = self.torchrun(ranks, name, ["post_train.py", *flags, "--output_dir", run])
        return self.measured(program, name, flags, ranks, limit)

    def measured(
        self, program: Program, name: str, flags: Sequence[str], ranks: int, limit: float
    ) -> Results:
        """Wait for a run: times, ratios, peaks of every rank and what the planner expects."""
        try:
            program.wait(limit)
        except PartError as error:  # the page shows what there is
            error.partial = self.results(program, name, flags, ranks)
            raise
        return self.results(program, name, flags, ranks)

    def results(self, program: Program, name: str, flags: Sequence[str], ranks: int) -> Results:
        """What a run has left so far."""
        run = self.scratch / name
        phases = self.scratch / "phases" / name
        lines = metrics(run) if (run / "metrics.jsonl").is_file() else []
        saves = [
            record["seconds"]
            for record in recorded(phases)
            if (record["event"], record["phase"], record["rank"]) == ("end", "save", 0)
        ]
        return {
            "ranks": ranks,
            "command": shlex.join(program.command),
            "whole": time.time() - program.begun,
            "iterations": [shown_metrics(line) for line in lines],
            "peaks": peaks(phases),
            "saves": saves,
            "planned": planned(flags, ranks),
        }

    # the launcher

    def recipe(self, name: str, limit: float, **settings: object) -> Results:
        """A run of the 8-GPU recipe through its launcher."""
        run = self.scratch / name
        phases = self.scratch / "phases" / name
        for folder in (run, phases):
            shutil.rmtree(folder, ignore_errors=True)
        flags = [*RECIPE.split(), *self.common("recipe"), *self.sizes.recipe_flags.split()]
        environment = {
            "NUM_GPUS": self.sizes.recipe_ranks,
            "OUTPUT_DIR": run,
            "SKIP_CHECKS": 1,
            "PHASES": phases,
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": 1,
        } | settings
        launch = ["bash", "run_post_train.sh", *flags]
        program = Program(launch, self.logs / f"{name}.log", **environment)
        config = ["--config", "configs/hunyuan15_8gpu.yaml", *flags]
        try:
            result = self.measured(program, name, config, self.sizes.recipe_ranks, limit)
        finally:  # torchrun has a session of its own
            end = ["bash", "run_post_train.sh", "--kill", *flags]
            Program(end, self.logs / f"{name}-end.log", **environment).wait(60)
        files = [path for path in newest_checkpoint(run).rglob("*") if path.is_file()]
        return result | {"checkpoint_gb": sum(path.stat().st_size for path in files) / 1e9}

    def unbroken(self, limit: float) -> Results:
        """The recipe without a kill."""
        return self.recipe("recipe8", limit, MAX_RESTARTS=0)

    def kill(self, limit: float) -> Results:
        """Kill the rank in the middle in the third rollout: the run must recover and end as if nothing had happened."""
        rank = self.sizes.recipe_ranks // 2
        result = self.recipe("killed8", limit, MAX_RESTARTS=1, KILL=f"{rank}:3:rollout")
        result |= recovery(recorded(self.scratch / "phases" / "killed8"))
        result["killed"] = rank
        unbroken, killed = self.scratch / "recipe8", self.scratch / "killed8"
        try:
            return result | compared(unbroken, killed, model=self.scratch / "recipe")
        except (OSError, ValueError) as error:  # the unbroken run may have failed
            return result | {"not_compared": str(error)}

    def remove_full(self) -> None:
        """Make room on the disk."""
        for name in ("full", "full2", "full4"):
            shutil.rmtree(self.scratch / name, ignore_errors=True)


def shown_metrics(line: Mapping[str, Any]) -> Results:
    """What a page needs of an iteration's metrics."""
    shown = {name: line.get(name) for name in ("step", "policy/ratio_max_deviation", *COMPARED)}
    seconds = {name: value for name, value in line.items() if name.startswith("time/")}
    return shown | seconds


def peaks(phases: Path) -> list[dict[str, float]]:
    """For each rank, the largest peak of each phase in GB, and that of the host memory."""
    by_rank: dict[int, dict[str, float]] = {}
    for record in recorded(phases):
        if record["event"] == "end":
            phase = record["phase"]
            rank = by_rank.setdefault(record["rank"], {})
            rank[phase] = max(rank.get(phase, 0.0), record["peak_gb"])
            rank["host"] = max(rank.get("host", 0.0), record["host_gb"])
    return [by_rank[rank] for rank in sorted(by_rank)]


def planned(flags: Sequence[str], ranks: int) -> Results:
    """The planner's GB at each moment, without the reward, which is small here; and GB into each rank per iteration."""
    plan = plan_of(parse(list(flags)), ranks, text_tokens=12)
    parts = [part for name, part in memory(plan).items() if name != "reward"]
    peaks = {moment: sum(part[moment] for part in parts) / 1e9 for moment in (*MOMENTS, "step")}
    peaks["update"] = max(peaks["update"], peaks.pop("step"))
    traffic = {name: size / 1e9 for name, size in volumes(plan).items()}
    return {"memory": peaks, "traffic": traffic}


def newest_checkpoint(run: Path) -> Path:
    """The last checkpoint of a run."""
    return max((run / "checkpoints").glob("step-??????"))


def compared(reference: Path, run: Path, model: Path) -> Results:
    """How far the final weights and the metrics of all iterations are from those of another run of all weights.

    model: the folder with which both began.
    """
    pairs = list(zip(metrics(run), metrics(reference), strict=True))
    differences = {name: max(relative(a[name], b[name]) for a, b in pairs) for name in COMPARED}
    ratio = max(line["policy/ratio_max_deviation"] for line in metrics(run))
    return weights_apart(reference, run, model) | {"metrics": differences, "ratio": ratio}


def weights_apart(reference: Path, run: Path, model: Path) -> Results:
    """Largest difference, share of equal weights, and the norm of the difference over that of the change."""
    weights = open_shards(newest_checkpoint(run))["weights"]
    reference_weights = open_shards(newest_checkpoint(reference))["weights"]
    if set(weights.names) != set(reference_weights.names):
        raise ValueError("the runs train different tensors")
    start = open_folder(model / "transformer")

    largest = 0.0
    equal = 0
    count = 0
    difference = 0.0  # squared norms
    change = 0.0
    for name in reference_weights.names:
        a, b = weights.read(name), reference_weights.read(name)
        largest = max(largest, (a - b).abs().max().item())
        equal += (a == b).sum().item()
        count += a.numel()
        difference += (a - b).norm().item() ** 2
        change += (b - start.read(name).to(b)).norm().item() ** 2
    of_change = math.sqrt(difference / change) if change else math.nan
    return {"largest": largest, "equal": equal / count, "of_change": of_change}


def relative(a: float, b: float) -> float:
    """Difference of two numbers over the larger one."""
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


def recovery(records: Sequence[Mapping[str, Any]]) -> Results:
    """Seconds from the kill until the ranks start again, until the next rollout begins, and until an iteration ends."""
    killed = next((record["time"] for record in records if record["event"] == "kill"), None)
    if killed is None:
        raise PartError("no rank was killed")
    later = [record for record in records if record["time"] > killed and record["attempt"]]

    def seconds_until(event: str, phase: str) -> float:
        times = [r["time"] for r in later if (r["event"], r["phase"]) == (event, phase)]
        return times[0] - killed if times else math.nan

    seconds = {
        "start": seconds_until("start", ""),
        "rollout": seconds_until("begin", "rollout"),
        "iteration": seconds_until("end", "update"),
    }
    updates = [r for r in later if (r["event"], r["phase"], r["rank"]) == ("end", "update", 0)]
    return {"recovery": seconds, "iterations_after": len(updates)}


def main(arguments: list[str] | None = None) -> None:
    options, parts = begin(__doc__, NAMES, page, arguments)
    ranks = Ranks(options.scratch, CPU if options.rehearse else GPU)
    parts.results["about"] = about("bash research/benchmarks/nccl_one_gpu.sh ")
    parts.results["mps"] = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    ranks.write_models(options.only or NAMES)
    if options.only:
        options.only.append("models")  # waits, if there is anything to wait for
    work = {
        "agree": ranks.agree,
        "models": ranks.models,
        "link": ranks.link,
        "full2": partial(ranks.full, 2),
        "full4": partial(ranks.full, 4),
        "recipe": ranks.unbroken,
        "kill": ranks.kill,
    }
    patience = 3 if options.rehearse else 1
    try:
        for name in NAMES:
            if name == "recipe":
                ranks.remove_full()
            parts.run(name, patience * LIMITS[name], work[name])
    finally:
        ranks.writer.kill()
    parts.end()


if __name__ == "__main__":
    main()
