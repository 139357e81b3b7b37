"""Several ranks on one GPU, connected by real NCCL over the loopback: agreement, memory, the launcher, a killed rank.

    bash research/benchmarks/nccl_one_gpu.sh python -m research.benchmarks.nccl --scratch /tmp/nccl --output research/benchmarks/DATE-nccl-h200.md

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
MODEL_PARTS = ("full2", "full4", "recipe", "kill")
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
LAYOUTS = {  # ranks, data-parallel ranks, flags
    "one process": (1, 1, ""),
    "one process, again": (1, 1, ""),
    "2 ranks: dp 2": (2, 2, ""),
    "2 ranks: sp 2": (2, 1, "--sp_size 2"),
    "4 ranks: dp 4": (4, 4, ""),
    "4 ranks: FSDP2, dp 2 x sp 2": (4, 2, "--sp_size 2 --enable_fsdp True"),
    "4 ranks: HSDP, 2 replicas of 2 shards": (4, 4, "--enable_fsdp True --dp_replicate 2"),
}
VALIDATION = "--report_to none --validate_at_step0 False --validation_num_inference_steps 1 "
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
    link: tuple[int, int]  # ranks, bytes
    recipe_ranks: int
    agree_flags: str = ""
    full_flags: str = ""
    recipe_flags: str = ""


GPU = Sizes(
    models={"reward": "--tiny --reward", "recipe": "--layers 2", "full": ""},
    most_ranks=4,
    clips=16,
    link=(4, 300_000_000),
    recipe_ranks=8,
)
CPU = Sizes(
    models={"reward": "--tiny --reward --device cpu", "recipe": "--tiny --layers 1 --device cpu"}
    | {"full": "--tiny --device cpu"},
    most_ranks=2,
    clips=4,
    agree_flags="--num_generations 2 --num_sampling_steps 2 --num_frames 5 --height 16 --width 16",
    link=(2, 1_000_000),
    recipe_ranks=2,
    full_flags=SMALL,
    recipe_flags=f"{SMALL} --batch_size 2 --num_generations 2",
)


class Ranks:
    """The programs of this benchmark, and what they leave in the scratch folder."""

    def __init__(self, scratch: Path, sizes: Sizes) -> None:
        self.scratch, self.sizes, self.logs = scratch, sizes, scratch / "logs"
        self.prompts = scratch / "prompts.txt"
        self.prompts.write_text(PROMPTS)
        self.valid = scratch / "valid.txt"
        self.valid.write_text(PROMPTS.partition("\n")[0] + "\n")
        lines = (ROOT / "assets" / "tiny" / "prompts_train.txt").read_text().splitlines()
        self.captions = scratch / "captions.txt"  # of the embedded model
        self.captions.write_text("\n".join(lines[:4]) + "\n")
        self.writer: Program | None = None

    def write_models(self, wanted: Collection[str]) -> None:
        """Begin to write the models that some of the wanted parts need; the smallest comes first."""
        users = {"reward": MODEL_PARTS, "recipe": MODEL_PARTS[2:], "full": MODEL_PARTS[:2]}
        commands = [
            shlex.join(
                python(
                    "-m",
                    "research.benchmarks.random_model",
                    "--output",
                    self.scratch / name,
                    *flags.split(),
                )
            )
            for name, flags in self.sizes.models.items()
            if {*users[name]} & {*wanted}
            and not (self.scratch / name / "model_index.json").is_file()
        ]
        self.writer = Program(
            ["bash", "-c", " && ".join(commands) or "true"], self.logs / "models.log"
        )

    def models(self, limit: float) -> Results:
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
        shutil.rmtree(self.scratch / "phases" / name, ignore_errors=True)
        own = python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks)
        command = [*(own if ranks > 1 else python()), *words]
        return Program(
            command, self.logs / f"{name}.log", PHASES=self.scratch / "phases" / name, **settings
        )

    # agree

    def agree(self, limit: float) -> Results:
        """All layouts at once: they are small."""
        wanted = {name: row for name, row in LAYOUTS.items() if row[0] <= self.sizes.most_ranks}
        runs, programs, end = {}, {}, time.monotonic() + limit
        prompts = ["--train_prompts", self.captions, "--validation_prompts", self.captions]
        for number, (name, (ranks, dp, flags)) in enumerate(wanted.items()):
            runs[name] = self.scratch / f"agree{number}"
            shutil.rmtree(runs[name], ignore_errors=True)
            words = [
                "post_train.py",
                *AGREE.split(),
                *flags.split(),
                *prompts,
                *self.sizes.agree_flags.split(),
            ]
            words += ["--batch_size", self.sizes.clips // dp, "--output_dir", runs[name]]
            programs[name] = self.torchrun(ranks, runs[name].name, words, OMP_NUM_THREADS=1)
        found: dict[str, Any] = {}
        try:
            for name, program in programs.items():
                try:
                    program.wait(max(1.0, end - time.monotonic()))
                    found[name] = compared(
                        runs["one process"], runs[name], ROOT / "assets" / "tiny"
                    )
                except (PartError, OSError, ValueError, KeyError) as error:
                    found[name] = {
                        "error": f"{type(error).__name__}: {error}",
                        "seconds": time.time() - program.begun,
                    }
        finally:
            for program in programs.values():
                program.kill()
        return {"layouts": found}

    # link

    def link(self, limit: float) -> Results:
        ranks, size = self.sizes.link
        output = self.scratch / "link.json"
        words = ["-m", "research.benchmarks.link_speed", "--output", output, "--bytes", size]
        self.torchrun(ranks, "link", words).wait(limit)
        return {"speeds": json.loads(output.read_text()), "bytes": size}

    # full size

    def full(self, ranks: int, limit: float) -> Results:
        """LoRA on the full-size model, two ranks per clip."""
        name, dp = f"full{ranks}", ranks // 2
        share = ["--batch_size", 2 // dp, "--micro_batch_size", 2 // dp]
        flags = [
            *FULL.split(),
            *map(str, share),
            *self.common("full"),
            *self.sizes.full_flags.split(),
        ]
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
        except PartError as error:  # what there is, is shown
            error.partial = self.found(program, name, flags, ranks)
            raise
        return self.found(program, name, flags, ranks)

    def found(self, program: Program, name: str, flags: Sequence[str], ranks: int) -> Results:
        run, phases = self.scratch / name, self.scratch / "phases" / name
        saves = [
            r["seconds"]
            for r in recorded(phases)
            if (r["event"], r["phase"], r["rank"]) == ("end", "save", 0)
        ]
        return {
            "ranks": ranks,
            "command": shlex.join(program.command),
            "whole": time.time() - program.begun,
            "iterations": [kept(line) for line in metrics(run)]
            if (run / "metrics.jsonl").is_file()
            else [],
            "peaks": peaks(phases),
            "saves": saves,
            "planned": planned(flags, ranks),
        }

    # the launcher

    def recipe(self, name: str, limit: float, **settings: object) -> Results:
        """A run of the 8-GPU recipe through its launcher."""
        run, phases = self.scratch / name, self.scratch / "phases" / name
        for folder in (run, phases):
            shutil.rmtree(folder, ignore_errors=True)
        flags = [*RECIPE.split(), *self.common("recipe"), *self.sizes.recipe_flags.split()]
        own = {
            "NUM_GPUS": self.sizes.recipe_ranks,
            "OUTPUT_DIR": run,
            "SKIP_CHECKS": 1,
            "PHASES": phases,
        }
        own |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": 1} | settings
        program = Program(["bash", "run_post_train.sh", *flags], self.logs / f"{name}.log", **own)
        config = ["--config", "configs/hunyuan15_8gpu.yaml", *flags]
        try:
            found = self.measured(program, name, config, self.sizes.recipe_ranks, limit)
        finally:  # torchrun has a session of its own
            Program(
                ["bash", "run_post_train.sh", "--kill", *flags],
                self.logs / f"{name}-end.log",
                **own,
            ).wait(60)
        size = sum(
            path.stat().st_size for path in newest_checkpoint(run).rglob("*") if path.is_file()
        )
        return found | {"checkpoint_gb": size / 1e9}

    def unbroken(self, limit: float) -> Results:
        return self.recipe("recipe8", limit, MAX_RESTARTS=0)

    def kill(self, limit: float) -> Results:
        """Kill the rank in the middle in the third rollout: the run must recover and end as if nothing had happened."""
        rank = self.sizes.recipe_ranks // 2
        found = self.recipe("killed8", limit, MAX_RESTARTS=1, KILL=f"{rank}:3:rollout")
        found |= recovery(recorded(self.scratch / "phases" / "killed8")) | {"killed": rank}
        try:
            return found | compared(
                self.scratch / "recipe8", self.scratch / "killed8", self.scratch / "recipe"
            )
        except (OSError, ValueError) as error:  # the unbroken run may have failed
            return found | {"not_compared": str(error)}

    def forget_full(self) -> None:
        """Make room on the disk."""
        for name in ("full", "full2", "full4"):
            shutil.rmtree(self.scratch / name, ignore_errors=True)


def kept(line: Mapping[str, Any]) -> Results:
    """What a page needs of an iteration's metrics."""
    return {name: line.get(name) for name in ("step", "policy/ratio_max_deviation", *COMPARED)} | {
        name: value for name, value in line.items() if name.startswith("time/")
    }


def peaks(phases: Path) -> list[dict[str, float]]:
    """For each rank, the largest peak of each phase in GB, and that of the host memory."""
    found: dict[int, dict[str, float]] = {}
    for record in recorded(phases):
        if record["event"] == "end":
            rank = found.setdefault(record["rank"], {})
            rank[record["phase"]] = max(rank.get(record["phase"], 0.0), record["peak_gb"])
            rank["host"] = max(rank.get("host", 0.0), record["host_gb"])
    return [found[rank] for rank in sorted(found)]


def planned(flags: Sequence[str], ranks: int) -> Results:
    """The planner's GB at each moment, without the reward, which is small here; and GB into each rank per iteration."""
    plan = plan_of(parse(list(flags)), ranks, text_tokens=12)
    parts = [part for name, part in memory(plan).items() if name != "reward"]
    found = {moment: sum(part[moment] for part in parts) / 1e9 for moment in (*MOMENTS, "step")}
    found["update"] = max(found["update"], found.pop("step"))
    return {"memory": found, "traffic": {name: size / 1e9 for name, size in volumes(plan).items()}}


def newest_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-??????"))


def compared(reference: Path, run: Path, model: Path) -> Results:
    """How far the final weights and the metrics of all iterations are from those of another run of all weights.

    model: the folder with which both began.
    """
    lines = list(zip(metrics(run), metrics(reference), strict=True))
    apart = {name: max(relative(a[name], b[name]) for a, b in lines) for name in COMPARED}
    ratio = max(line["policy/ratio_max_deviation"] for line in metrics(run))
    return weights_apart(reference, run, model) | {"metrics": apart, "ratio": ratio}


def weights_apart(reference: Path, run: Path, model: Path) -> Results:
    """Largest difference, share of equal weights, and the norm of the difference over that of the change."""
    ours, theirs = (open_shards(newest_checkpoint(path))["weights"] for path in (run, reference))
    if set(ours.names) != set(theirs.names):
        raise ValueError("the runs train different tensors")
    start, largest = open_folder(model / "transformer"), 0.0
    sums = dict.fromkeys(("equal", "count", "apart", "change"), 0.0)
    for name in theirs.names:
        a, b = ours.read(name), theirs.read(name)
        largest = max(largest, (a - b).abs().max().item())
        sums["equal"] += (a == b).sum().item()
        sums["count"] += a.numel()
        sums["apart"] += (a - b).norm().item() ** 2
        sums["change"] += (b - start.read(name).to(b)).norm().item() ** 2
    of_change = math.sqrt(sums["apart"] / sums["change"]) if sums["change"] else math.nan
    return {"largest": largest, "equal": sums["equal"] / sums["count"], "of_change": of_change}


def relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


def recovery(records: Sequence[Mapping[str, Any]]) -> Results:
    """Seconds from the kill until the ranks start again, until the next rollout begins, and until an iteration ends."""
    killed = next((record["time"] for record in records if record["event"] == "kill"), None)
    if killed is None:
        raise PartError("no rank was killed")
    later = [record for record in records if record["time"] > killed and record["attempt"]]
    first = {
        "start": ("start", ""),
        "rollout": ("begin", "rollout"),
        "iteration": ("end", "update"),
    }
    found = {
        name: next(
            (r["time"] - killed for r in later if (r["event"], r["phase"]) == key), float("nan")
        )
        for name, key in first.items()
    }
    updates = sum((r["event"], r["phase"], r["rank"]) == ("end", "update", 0) for r in later)
    return {"recovery": found, "iterations_after": updates}


def main(words: list[str] | None = None) -> None:
    options, parts = begin(__doc__, NAMES, page, words)
    ranks = Ranks(options.scratch, CPU if options.rehearse else GPU)
    parts.results |= {
        "about": about("bash research/benchmarks/nccl_one_gpu.sh "),
        "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
    }
    ranks.write_models(options.only or NAMES)
    if options.only:
        options.only.append("models")  # waits, if there is anything to wait for
    try:
        for name in NAMES:
            work = {
                "models": ranks.models,
                "agree": ranks.agree,
                "link": ranks.link,
                "recipe": ranks.unbroken,
            }
            work |= {
                "kill": ranks.kill,
                "full2": lambda limit: ranks.full(2, limit),
                "full4": lambda limit: ranks.full(4, limit),
            }
            if name == "recipe":
                ranks.forget_full()
            parts.run(name, LIMITS[name] * (3 if options.rehearse else 1), work[name])
    finally:
        ranks.writer.kill()
    parts.end()


if __name__ == "__main__":
    main()
