"""All parts at their real size on one GPU, with random weights: Qwen2.5-VL 7B, ByT5, transformer, VAE, VideoAlign 2B.

    python -m research.benchmarks.full_stack --scratch /tmp/full_stack --output research/benchmarks/DATE-full-stack-h200.md

Trains two iterations of configs/hunyuan15_1gpu_lora.yaml by post_train.py itself. SIGTERM in the rollout of the second
one must end it with exit code 75; the same command resumes. generate.py then samples from the checkpoint. The parts are
model (write the folder, 41 GB, unless it exists), train, resume, generate.
"""

import json
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
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
from sage_grpo.exit_codes import DONE, PREEMPTED

NAMES = ("model", "train", "resume", "generate")
LIMITS = {"model": 150, "train": 300, "resume": 240, "generate": 150}
PROMPT = "A small red boat crosses a quiet lake in the morning light."
CONFIG = "configs/hunyuan15_1gpu_lora.yaml"
# Fewer denoising steps than the recipe's, one of them trained, and one clip of validation: two iterations in 4 minutes.
TRAIN = (
    f"{ALL_STEPS} --batch_size 4 --num_generations 4 "
    "--max_steps 2 --num_sampling_steps 4 --timestep_fraction 0.25 --report_to none --validate_at_step0 False "
    "--validation_num_inference_steps 4 --validate_video_length 81 --validation_fixed_size 352x624"
)
GENERATE = "--num_frames 81 --fixed_size 352x624 --num_inference_steps 10"
# What a rehearsal on the CPU changes.
SMALL_TRAIN = "--device cpu --compile False --validate_video_length 5 --validation_fixed_size 16x16"
SMALL_GENERATE = "--num_frames 5 --fixed_size 16x16 --num_inference_steps 2"
LOADING = ("load reward", "load encoders", "encode prompts", "load transformer", "load checkpoint")
IMPORTS, READY = "Python starts, imports", "all until the first rollout"
MOMENTS = ("rollout", "decode", "reward", "anchor", "update")


class FullStack:
    """The programs of this benchmark, and what they leave in the scratch folder."""

    def __init__(self, scratch: Path, rehearse: bool) -> None:
        self.scratch, self.rehearse = scratch, rehearse
        self.model, self.run, self.logs = scratch / "model", scratch / "run", scratch / "logs"

    def write_model(self, limit: float) -> Results:
        if (self.model / "model_index.json").is_file():
            return {"line": f"{self.model}: already there", "gb": gigabytes(self.model)}
        words = ["--tiny", "--device", "cpu"] if self.rehearse else ["--encoders"]
        command = python(
            "-m", "research.benchmarks.random_model", "--output", self.model, "--reward", *words
        )
        program = Program(command, self.logs / "model.log")
        program.wait(limit)
        return {"line": program.tail().strip().splitlines()[-1], "gb": gigabytes(self.model)}

    def flags(self) -> list[str]:
        """Flags of post_train.py, without the resume."""
        prompts = self.scratch / "validation.txt"
        prompts.write_text(f"{PROMPT}\n")
        small = ["--train_prompts", prompts, *SMALL_TRAIN.split()]
        words = [
            "--config",
            CONFIG,
            "--pretrained_model_root",
            self.model,
            "--output_dir",
            self.run,
        ]
        words += [
            "--prompt_cache",
            self.scratch / "embeddings",
            "--validation_prompts",
            prompts,
            *TRAIN.split(),
        ]
        return [str(word) for word in words + (small if self.rehearse else [])]

    def train(self, limit: float) -> Results:
        """Train until the second rollout, in which a signal stops the run."""
        program, phases = self.start("train", "post_train.py", *self.flags())
        end = time.monotonic() + limit
        while program.process.poll() is None and time.monotonic() < end and rollouts(phases) < 2:
            time.sleep(0.1)
        time.sleep(0 if self.rehearse else 1)  # a tiny iteration may take no more than that
        program.process.send_signal(signal.SIGTERM)
        told = time.time()
        found = self.outcome(program, phases, max(1.0, end - time.monotonic()), PREEMPTED)
        return found | {"stop_seconds": found["ended"] - told}

    def resume(self, limit: float) -> Results:
        """Start the command again; its second iteration is still to do."""
        program, phases = self.start(
            "resume", "post_train.py", *self.flags(), "--resume_from_checkpoint", "auto"
        )
        found = self.outcome(program, phases, limit, DONE)
        if [line["step"] for line in found["iterations"]] != [1, 2]:
            raise PartError(f"the run has other iterations than 1 and 2: {program.tail()}")
        return found

    def generate(self, limit: float) -> Results:
        """Sample one clip from the last checkpoint."""
        newest = max((self.run / "checkpoints").glob("step-??????"))
        output = self.scratch / "generated"
        words = [
            "--model_path",
            self.model,
            "--checkpoint_path",
            newest,
            "--prompt",
            PROMPT,
            "--output_path",
            output,
        ]
        words += (SMALL_GENERATE if self.rehearse else GENERATE).split()
        program, phases = self.start("generate", "generate.py", *words)
        program.wait(limit)
        clip = next(output.glob("*.mp4"))
        record = json.loads(clip.with_suffix(".json").read_text())
        return {
            "command": program.command,
            "whole": time.time() - program.begun,
            "records": ended(phases),
        } | {
            "clip_bytes": clip.stat().st_size,
            "sampling": {
                name: record[name]
                for name in ("frames", "height", "width", "num_steps", "guidance")
            },
            "checkpoint": newest.name,
            "host_gb": host_gb(phases),
        }

    def start(self, name: str, *words: object) -> tuple[Program, Path]:
        phases = self.scratch / "phases" / name
        return Program(python(*words), self.logs / f"{name}.log", PHASES=phases), phases

    def outcome(self, program: Program, phases: Path, limit: float, code: int) -> Results:
        """Wait for a run, which must end with this exit code; times, peaks and what it wrote."""
        try:
            program.wait(limit, (code,))
        except PartError as error:
            error.partial = self.found(program, phases)
            raise
        return self.found(program, phases) | {"exit_code": code}

    def found(self, program: Program, phases: Path) -> Results:
        now, checkpoints = time.time(), sorted((self.run / "checkpoints").glob("step-??????"))
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
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e9


def rollouts(phases: Path) -> int:
    """How many rollouts have begun."""
    return sum(
        record["event"] == "begin" and record["phase"] == "rollout" for record in recorded(phases)
    )


def ended(phases: Path) -> list[dict[str, Any]]:
    """Seconds and peak of each phase, in order."""
    kept = ("phase", "seconds", "peak_gb", "time")
    return [
        {name: record[name] for name in kept}
        for record in recorded(phases)
        if record["event"] == "end"
    ]


def planned(flags: Sequence[str]) -> dict[str, float]:
    """The planner's GB at each moment."""
    from sage_grpo.config.parse import parse
    from sage_grpo.tools.plan.memory import memory
    from sage_grpo.tools.plan.planner import plan_of

    parts = memory(plan_of(parse(list(flags)), 1)).values()
    found = {moment: sum(part[moment] for part in parts) / 1e9 for moment in (*MOMENTS, "step")}
    return found | {"update": max(found["update"], found["step"])}


def main(words: list[str] | None = None) -> None:
    options, parts = begin(__doc__, NAMES, page, words)
    stack = FullStack(options.scratch, options.rehearse)
    parts.results |= {"about": about(), "flags": stack.flags()}
    parts.run("model", LIMITS["model"], stack.write_model)
    if (stack.model / "model_index.json").is_file():
        parts.results["planned"] = planned(stack.flags())
    works: dict[str, Callable[[float], Results]] = {"train": stack.train, "resume": stack.resume}
    for name, work in (works | {"generate": stack.generate}).items():
        parts.run(name, LIMITS[name], work)
    parts.end()


def page(results: Results) -> str:
    """The results as Markdown."""
    parts = results["parts"]
    lines = heading("All parts at full size", results["about"])
    lines += ["    python post_train.py " + " ".join(results["flags"]), ""]
    model = parts.get("model")
    lines += (
        [f"- model: {model['line']}."] if model and "line" in model else failure("model", model)
    )
    train, resume = (parts.get(name) for name in ("train", "resume"))
    for name, part in (("train", train), ("resume", resume)):
        lines += failure(name, part) if part is None or "error" in part else []
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
    cells: dict[str, list[str]] = {}
    for column, part in enumerate((train, resume)):
        if not part or "records" not in part:
            continue
        names = [*LOADING, *MOMENTS, "save", "validation"]
        values = {name: [r for r in part["records"] if r["phase"] == name] for name in names}
        rows = {IMPORTS: [f"{part['before']:.1f}", ""], READY: [f"{part['ready']:.1f}", ""]}
        for name, found in values.items():
            if found:  # a stopped rollout is the last of two
                first = found[0]
                rows[name] = [f"{first['seconds']:.1f}", f"{first['peak_gb']:.1f}"]
        for name, pair in rows.items():
            cells.setdefault(name, ["", "", "", ""])[2 * column : 2 * column + 2] = pair
    rows = [[n, *cells[n], f"{planned[n]:.1f}" if n in planned else ""] for n in order(cells)]
    head = (
        "phase",
        "iteration 1, s",
        "peak GB",
        "resumed, iteration 2, s",
        "peak GB",
        "planned GB",
    )
    return table(head, rows)


def order(cells: Mapping[str, Any]) -> list[str]:
    wanted = [IMPORTS, *LOADING, READY, *MOMENTS, "save", "validation"]
    return [name for name in wanted if name in cells]


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
    return (
        ", ".join(f"{name} of {size:.2f} GB" for name, size in part["checkpoints"].items())
        or "no checkpoint"
    )


def generated_lines(part: Results) -> list[str]:
    s = part["sampling"]
    rows = [[r["phase"], f"{r['seconds']:.1f}", f"{r['peak_gb']:.1f}"] for r in part["records"]]
    return [
        f"{s['frames']} x {s['height']} x {s['width']}, {s['num_steps']} steps, guidance {s['guidance']:g}, from "
        f"{part['checkpoint']}: {part['whole']:.0f} s in all, {part['host_gb']:.1f} GB of host memory, an mp4 of "
        f"{part['clip_bytes']:,} bytes.",
        "",
        *table(("phase", "s", "peak GB"), rows),
    ]


if __name__ == "__main__":
    main()
