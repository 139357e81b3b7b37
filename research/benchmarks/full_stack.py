"""All parts at their real size on one GPU, with random weights: Qwen2.5-VL 7B, ByT5, transformer, VAE, VideoAlign 2B.

    python -m research.benchmarks.full_stack --scratch /tmp/full_stack \\
        --output research/benchmarks/results/DATE-full-stack-h200.md

Trains two iterations of configs/hunyuan15_1gpu_lora.yaml by post_train.py itself. SIGTERM in the rollout of the second
one must end it with exit code 75; the same command resumes. generate.py then samples from the checkpoint. The parts are
model (write the folder, 41 GB, unless it exists), train, resume, generate.
"""

import json
import math
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from research.benchmarks.parts import (
    ALL_STEPS,
    PartError,
    Program,
    Results,
    about,
    begin,
    failure,
    heading,
    host_gb,
    metrics,
    python,
    recorded,
    table,
    wrapped,
)
from sage_grpo.config.parse import parse
from sage_grpo.exit_codes import DONE, PREEMPTED
from sage_grpo.tools.plan.memory import memory
from sage_grpo.tools.plan.planner import plan_of

NAMES = ("model", "train", "resume", "generate")
LIMITS = {"model": 150, "train": 300, "resume": 240, "generate": 150}
PROMPT = "A small red boat crosses a quiet lake in the morning light."
CONFIG = "configs/hunyuan15_1gpu_lora.yaml"
# Fewer denoising steps than the recipe's, one of them trained, and one clip of validation: two iterations in 4 minutes.
TRAIN = (
    f"{ALL_STEPS} --batch_size 4 --num_generations 4 "
    "--max_steps 2 --num_sampling_steps 4 --timestep_fraction 0.25 --report_to none --validate_at_step0 False "
    "--validation_num_inference_steps 4 --validate_video_length 81 --validation_fixed_size 352x624 "
    "--validation_videos 0"
)
GENERATE = "--num_frames 81 --fixed_size 352x624 --num_inference_steps 10"
# What a rehearsal on the CPU changes.
SMALL_TRAIN = "--device cpu --compile False --validate_video_length 5 --validation_fixed_size 16x16"
SMALL_GENERATE = "--num_frames 5 --fixed_size 16x16 --num_inference_steps 2"
LOADING = ("load reward", "load encoders", "encode prompts", "load transformer", "load checkpoint")
IMPORTS = "Python starts, imports"
READY = "all until the first rollout"
MOMENTS = ("rollout", "decode", "reward", "anchor", "update")
ROWS = (IMPORTS, *LOADING, READY, *MOMENTS, "save", "validation")


class FullStack:
    """The programs of this benchmark, and what they leave in the scratch folder."""

    def __init__(self, scratch: Path, rehearse: bool) -> None:
        self.scratch = scratch
        self.rehearse = rehearse
        self.model = scratch / "model"
        self.run = scratch / "run"
        self.logs = scratch / "logs"

    def write_model(self, limit: float) -> Results:
        """Write the random model, unless it exists."""
        if (self.model / "model_index.json").is_file():
            return {"line": f"{self.model}: already there", "gb": gigabytes(self.model)}
        command = python("-m", "research.benchmarks.random_model", "--output", self.model)
        command += ["--reward"]
        command += ["--tiny", "--device", "cpu"] if self.rehearse else ["--encoders"]
        program = Program(command, self.logs / "model.log")
        program.wait(limit)
        return {"line": program.tail().strip().splitlines()[-1], "gb": gigabytes(self.model)}

    def flags(self) -> list[str]:
        """Flags of post_train.py, without the resume."""
        prompts = self.scratch / "validation.txt"
        prompts.write_text(f"{PROMPT}\n")
        words = ["--config", CONFIG, "--pretrained_model_root", self.model]
        words += ["--output_dir", self.run, "--prompt_cache", self.scratch / "embeddings"]
        words += ["--validation_prompts", prompts, *TRAIN.split()]
        if self.rehearse:
            words += ["--train_prompts", prompts, *SMALL_TRAIN.split()]
        return [str(word) for word in words]

    def train(self, limit: float) -> Results:
        """Train until the second rollout, in which a signal stops the run."""
        program, phases = self.start("train", "post_train.py", *self.flags())
        end = time.monotonic() + limit
        while program.process.poll() is None and time.monotonic() < end and rollouts(phases) < 2:
            time.sleep(0.1)
        if not self.rehearse:  # a tiny iteration may take no more than a second
            time.sleep(1)
        program.process.send_signal(signal.SIGTERM)
        signaled = time.time()
        result = self.outcome(program, phases, max(1.0, end - time.monotonic()), PREEMPTED)
        return result | {"stop_seconds": result["ended"] - signaled}

    def resume(self, limit: float) -> Results:
        """Start the command again; its second iteration is still to do."""
        words = ["post_train.py", *self.flags(), "--resume_from_checkpoint", "auto"]
        program, phases = self.start("resume", *words)
        result = self.outcome(program, phases, limit, DONE)
        if [line["step"] for line in result["iterations"]] != [1, 2]:
            raise PartError(f"the run has other iterations than 1 and 2: {program.tail()}")
        return result

    def generate(self, limit: float) -> Results:
        """Sample one clip from the last checkpoint."""
        checkpoint = max((self.run / "checkpoints").glob("step-??????"))
        output = self.scratch / "generated"
        words = ["generate.py", "--model_path", self.model, "--checkpoint_path", checkpoint]
        words += ["--prompt", PROMPT, "--output_path", output]
        words += (SMALL_GENERATE if self.rehearse else GENERATE).split()
        program, phases = self.start("generate", *words)
        program.wait(limit)
        clip = next(output.glob("*.mp4"))
        record = json.loads(clip.with_suffix(".json").read_text())
        settings = ("frames", "height", "width", "num_steps", "guidance")
        return {
            "command": program.command,
            "whole": time.time() - program.begun,
            "records": ended(phases),
            "clip_bytes": clip.stat().st_size,
            "sampling": {name: record[name] for name in settings},
            "checkpoint": checkpoint.name,
            "host_gb": host_gb(phases),
        }

    def start(self, name: str, *words: object) -> tuple[Program, Path]:
        """Start a program; returns it and the folder where its phases are recorded."""
        phases = self.scratch / "phases" / name
        return Program(python(*words), self.logs / f"{name}.log", PHASES=phases), phases

    def outcome(self, program: Program, phases: Path, limit: float, code: int) -> Results:
        """Wait for a run, which must end with this exit code; times, peaks and what it wrote."""
        try:
            program.wait(limit, (code,))
        except PartError as error:
            error.partial = self.results(program, phases)
            raise
        return self.results(program, phases) | {"exit_code": code}

    def results(self, program: Program, phases: Path) -> Results:
        """What a run has left so far."""
        now = time.time()
        checkpoints = sorted((self.run / "checkpoints").glob("step-??????"))
        begins = [record for record in recorded(phases) if record["event"] == "begin"]
        rollout = [record["time"] for record in begins if record["phase"] == "rollout"]
        return {
            "command": program.command,
            "ended": now,
            "whole": now - program.begun,
            "records": ended(phases),
            "before": begins[0]["time"] - program.begun if begins else math.nan,
            "ready": rollout[0] - program.begun if rollout else math.nan,
            "prompts": len(list((self.scratch / "embeddings").rglob("*.safetensors"))),
            "iterations": metrics(self.run) if (self.run / "metrics.jsonl").is_file() else [],
            "checkpoints": {path.name: gigabytes(path) for path in checkpoints},
            "host_gb": host_gb(phases),
        }


def gigabytes(folder: Path) -> float:
    """Size of all files in a folder, in GB."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e9


def rollouts(phases: Path) -> int:
    """How many rollouts have begun."""
    begins = [record for record in recorded(phases) if record["event"] == "begin"]
    return sum(record["phase"] == "rollout" for record in begins)


def ended(phases: Path) -> list[dict[str, Any]]:
    """Seconds and peak of each phase, in order."""
    keys = ("phase", "seconds", "peak_gb", "time")
    ends = [record for record in recorded(phases) if record["event"] == "end"]
    return [{key: record[key] for key in keys} for record in ends]


def planned(flags: Sequence[str]) -> dict[str, float]:
    """The planner's GB at each moment."""
    parts = memory(plan_of(parse(list(flags)), 1)).values()
    peaks = {moment: sum(part[moment] for part in parts) / 1e9 for moment in (*MOMENTS, "step")}
    peaks["update"] = max(peaks["update"], peaks["step"])
    return peaks


def main(arguments: list[str] | None = None) -> None:
    options, parts = begin(__doc__, NAMES, page, arguments)
    stack = FullStack(options.scratch, options.rehearse)
    parts.results |= {"about": about(), "flags": stack.flags()}
    parts.run("model", LIMITS["model"], stack.write_model)
    if (stack.model / "model_index.json").is_file():
        parts.results["planned"] = planned(stack.flags())
    parts.run("train", LIMITS["train"], stack.train)
    parts.run("resume", LIMITS["resume"], stack.resume)
    parts.run("generate", LIMITS["generate"], stack.generate)
    parts.end()


def page(results: Results) -> str:
    """The results as Markdown."""
    parts = results["parts"]
    lines = heading("All parts at full size", results["about"])
    lines += ["    python post_train.py " + " ".join(results["flags"]), ""]
    model = parts.get("model")
    if model and "line" in model:
        lines.append(f"- model: {model['line']}.")
    else:
        lines += failure("model", model)
    train = parts.get("train")
    resume = parts.get("resume")
    for name, part in {"train": train, "resume": resume}.items():
        if part is None or "error" in part:
            lines += failure(name, part)
    lines += ["", "Peaks are those of torch's allocator; the planner's have no reserve.", ""]
    lines += [*phase_table(train, resume, results.get("planned", {})), ""]
    lines += run_facts(train, resume)
    generated = parts.get("generate")
    if generated and "records" in generated:
        lines += ["", "## generate.py from the checkpoint", "", *generated_lines(generated)]
    else:
        lines += failure("generate", generated)
    return wrapped(lines)


def phase_table(
    train: Results | None, resume: Results | None, planned: Mapping[str, float]
) -> list[str]:
    """Seconds and peak of each phase in the first run and in the resumed one."""
    first = phase_cells(train)
    second = phase_cells(resume)
    nothing = ("", "")
    rows = []
    for name in (name for name in ROWS if name in first or name in second):
        cells = [*first.get(name, nothing), *second.get(name, nothing)]
        rows.append([name, *cells, f"{planned[name]:.1f}" if name in planned else ""])
    head = (
        "phase",
        "iteration 1, s",
        "peak GB",
        "resumed, iteration 2, s",
        "peak GB",
        "planned GB",
    )
    return table(head, rows)


def phase_cells(part: Results | None) -> dict[str, tuple[str, str]]:
    """Seconds and peak of the first of each phase in a run; a stopped rollout is its second."""
    if not part or "records" not in part:
        return {}
    cells = {IMPORTS: (f"{part['before']:.1f}", ""), READY: (f"{part['ready']:.1f}", "")}
    for record in part["records"]:
        seconds, peak = f"{record['seconds']:.1f}", f"{record['peak_gb']:.1f}"
        cells.setdefault(record["phase"], (seconds, peak))
    return cells


def run_facts(train: Results | None, resume: Results | None) -> list[str]:
    """Exit codes, ratios, rewards and checkpoints."""
    lines = []
    if train and "exit_code" in train:
        lines.append(
            f"- SIGTERM in the second rollout: exit code {train['exit_code']} after {train['stop_seconds']:.1f} s, "
            f"with {checkpoint_text(train)}. The first process ran {train['whole']:.0f} s and encoded "
            f"{train['prompts']} prompts; that time includes loading the encoders. It took {train['host_gb']:.1f} GB "
            "of host memory without mapped files."
        )
    if resume and "exit_code" in resume:
        deviations = [f"{line['policy/ratio_max_deviation']:.3g}" for line in resume["iterations"]]
        rewards = [f"{line['reward/total']:.4g}" for line in resume["iterations"]]
        lines += [
            f"- The same command resumed: exit code {resume['exit_code']} after {resume['whole']:.0f} s, with "
            f"{checkpoint_text(resume)} and {resume['host_gb']:.1f} GB of host memory.",
            f"- Largest ratio deviation of the two iterations: {', '.join(deviations)}. Reward: {', '.join(rewards)}.",
        ]
    return lines


def checkpoint_text(part: Results) -> str:
    """Names and sizes of the checkpoints."""
    checkpoints = [f"{name} of {size:.2f} GB" for name, size in part["checkpoints"].items()]
    return ", ".join(checkpoints) or "no checkpoint"


def generated_lines(part: Results) -> list[str]:
    """What was sampled, and seconds and peak of each phase."""
    s = part["sampling"]
    rows = [
        [record["phase"], f"{record['seconds']:.1f}", f"{record['peak_gb']:.1f}"]
        for record in part["records"]
    ]
    return [
        f"{s['frames']} x {s['height']} x {s['width']}, {s['num_steps']} steps, guidance {s['guidance']:g}, from "
        f"{part['checkpoint']}: {part['whole']:.0f} s in all, {part['host_gb']:.1f} GB of host memory, an mp4 of "
        f"{part['clip_bytes']:,} bytes.",
        "",
        *table(("phase", "s", "peak GB"), rows),
    ]


if __name__ == "__main__":
    main()
