"""A run folder as the trainer leaves it, with made-up but plausible, deterministic numbers."""

import json
import math
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from sage_grpo.algo.equalizer import equalizer, gradient_scale
from sage_grpo.algo.sde import build_schedule, flow_sigmas
from sage_grpo.config.fields import Config
from sage_grpo.runs.media import write_mp4
from sage_grpo.worlds.shapes.damage import add_noise, fade, jitter
from sage_grpo.worlds.shapes.scenes import captions, render, sample_scenes

STEPS = 20  # denoising
WEIGHTS = {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}
PERFECT = {"VQ": 0.85, "MQ": 1.03, "TA": 0.80, "total": 1.74}
START = {"VQ": -0.55, "MQ": 0.1, "TA": -0.4}  # of an untrained model
PHASES = {"rollout": 9.0, "decode": 0.8, "reward": 0.5, "gold": 1.6, "anchor": 2.2, "update": 14.0}


def make_run(folder: Path, iterations: int = 200, every: int = 50, prompts: int = 14) -> Path:
    """`prompts` validation clips of 9 frames at iteration 0 and then every `every` iterations."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    (folder / "command.txt").write_text(
        "python post_train.py --config configs/tiny_cpu.yaml --output_dir outputs/demo\n"
    )
    (folder / "config.yaml").write_text(
        Config(height=32, width=32, eta=0.7, reward_weights={"VQ": 1.0}).to_yaml()
    )
    lines = [run_line(), validation(folder, 0, 0.0, prompts)]
    for step in range(1, iterations + 1):
        lines.append(train_line(step, rng))
        if step % every == 0:
            lines.append(validation(folder, step, progress(step), prompts))
    write_lines(folder, lines)
    return folder


def write_lines(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def progress(step: int) -> float:
    """Share of the gap to perfect clips that is closed after so many iterations."""
    return 0.75 * (1 - math.exp(-step / 70))


def run_line(step: int = 0) -> dict[str, Any]:
    schedule = build_schedule("sage_grpo", flow_sigmas(STEPS, 5.0), 0.5)
    return {
        "kind": "run",
        "step": step,
        "time": "2026-11-15T05:00:00",
        "world": "shapes",
        "perfect": PERFECT,
        "perfect_is_best": True,
        "vae_floor": {"distance": 0.021},
        "schedule": {
            "sigmas": flow_sigmas(STEPS, 5.0).tolist(),
            "std": schedule.std.tolist(),
            "equalizer": equalizer(schedule).tolist(),
            "gradient_scale": gradient_scale(schedule).tolist(),
            "kl_gradient_scale": gradient_scale(schedule).tolist(),
        },
        "versions": {
            "python": "3.11.7",
            "torch": "2.13.0",
            "diffusers": "0.42.1",
            "sage_grpo": "0.1.0",
        },
        "device": "NVIDIA H200",
        "ranks": 1,
        "trainable_parameters": 1_204_224,
    }


def train_line(step: int, rng: np.random.Generator) -> dict[str, Any]:
    done = progress(step)
    noise = rng.standard_normal(8)
    scores = {
        name: START[name] - 0.25 + (PERFECT[name] - START[name]) * done + 0.08 * noise[0]
        for name in WEIGHTS
    }
    kl = 2e-5 * (1 + (step - 1) % 5) * (1 + step / 100) * math.exp(0.3 * noise[1])
    clip = 1 - math.exp(-kl / 2e-4)
    seconds = {name: value * (1 + 0.03 * abs(noise[2])) for name, value in PHASES.items()}
    return {
        "kind": "train",
        "step": step,
        "reward/total": sum(WEIGHTS[name] * score for name, score in scores.items()),
        "reward/std": 0.5 - 0.25 * done + 0.03 * noise[3],
        "reward/group_std": 0.32 - 0.2 * done + 0.02 * noise[4],
        **{f"reward/{name}": score for name, score in scores.items()},
        "signal/advantage_size": 0.8,
        "reward/failed": int(step % 60 == 0),
        "reward/starved_groups": 0,
        "reward/flat_groups": int(step % 90 == 0),
        "gold/match": float(np.clip(0.25 + 0.6 * done + 0.07 * noise[5], 0, 1)),
        "gold/distance": 0.075 - 0.04 * done + 0.003 * noise[6],
        "gold/prompt_distance": 0.09 - 0.045 * done + 0.003 * noise[6],
        "policy/loss": 1e-4 * noise[7],
        "policy/objective": 1e-4 * noise[7] + 1e-5 * kl,
        "policy/ratio_mean": 1 - kl,
        "policy/log_ratio_mean": -kl,
        "policy/approx_kl": kl**2 / 2,
        "policy/clip_fraction": clip,
        "policy/clip_low": clip * 0.4,
        "policy/clip_high": clip * 0.15,
        "policy/ratio_max_deviation": 9 * kl,
        "policy/grad_norm": (0.4 + 0.3 * math.exp(-step / 40)) * math.exp(0.25 * noise[2]),
        "policy/skipped_updates": 0,
        "kl/anchor": kl,
        "kl/rollout": kl / 5,
        "kl/coef": min(1e-5, 1e-7 + 1e-7 * 2 * step),
        "kl/anchor_age": 2 * ((step - 1) % 5),
        "lr": 1e-4 * min(1, step / 20),
        "updates": 2 * step,
        **{f"time/{name}": value for name, value in seconds.items()},
        "time/total": sum(seconds.values()) + 0.4,
        "memory/peak_gb": 18.2 + 0.02 * (step == 3),
        "signal/gradient": 0.4 + 0.3 * noise[1],
        "signal/variety": 0.1,
        "signal/same_reward": 0.0,
        "signal/anchor_moved": 1e-5,
        "signal/weight_rms": 0.05,
        "signal/rank_weights": 0.0,
        "signal/rank_prompts": 0.0,
        "per_step": per_step(kl, clip, rng),
    }


def per_step(kl: float, clip: float, rng: np.random.Generator) -> dict[str, list[float | None]]:
    """Lists of T; the last step is not trained."""
    profile = np.exp(np.linspace(-4, 2.5, STEPS)) / np.exp(np.linspace(-4, 2.5, STEPS)).mean()
    wobble = np.exp(0.2 * rng.standard_normal(STEPS))
    table = {
        "ratio_mean": 1 - kl * profile * wobble / 5,
        "log_ratio_mean": -kl * profile * wobble / 5 + 2e-7 * rng.standard_normal(STEPS),
        "approx_kl": (kl * profile) ** 2 / 2,
        "clip_fraction": np.clip(clip * profile, 0, 1),
        "clip_low": np.clip(0.4 * clip * profile, 0, 1),
        "clip_high": np.clip(0.15 * clip * profile, 0, 1),
        "ratio_max_deviation": 9 * kl * profile,
        "grad_v": 3e-4 * wobble,
        "kl_anchor": kl * profile * wobble,
        "kl_rollout": kl * profile * wobble / 5,
        "count": np.full(STEPS, 64.0),
    }
    return {
        name: [*values[:-1].tolist(), 0.0 if name == "count" else None]
        for name, values in table.items()
    }


def validation(folder: Path, step: int, done: float, prompts: int) -> dict[str, Any]:
    """Writes the clips of one validation, better with `done`; returns its line of metrics."""
    home = folder / "validation" / f"step-{step:06d}"
    home.mkdir(parents=True)
    rng = np.random.default_rng(1)
    entries = []
    for i, (prompt, video) in enumerate(videos(prompts, done)):
        # the same at every validation, but for the part that training amplifies
        luck = rng.standard_normal(3)
        scores = {
            name: START[name] + (PERFECT[name] - START[name]) * done * (1 + 0.5 * luck[0])
            for name in WEIGHTS
        }
        scores = {name: value + 0.1 * luck[1] for name, value in scores.items()}
        distance = 0.07 - 0.04 * done * (1 + 0.2 * luck[1]) + 0.004 * luck[2]
        gold = {
            "match": int(luck[2] < 2 * done - 0.6),
            "distance": distance,
            "prompt_distance": 1.2 * distance,
        }
        name = f"{i:04d}-1a2b3c4d-{930 + i}-0.mp4"
        (home / name).write_bytes(video)
        scores["total"] = sum(WEIGHTS[key] * value for key, value in scores.items())
        entries.append(
            {
                "file": name,
                "prompt": prompt,
                "seed": 930 + i,
                "number": 0,
                "scores": scores,
                "gold": gold,
            }
        )
    (home / "clips.json").write_text(json.dumps(entries))
    return validation_line(step, entries)


@cache
def videos(count: int, done: float) -> list[tuple[str, bytes]]:
    """Prompts with their mp4 files, which are encoded once for all tests of a process."""
    generator = torch.Generator().manual_seed(0)
    scenes = sample_scenes(count, generator)
    clips = render(scenes, 9, 32, 32)
    for damage, strength in ((fade, 0.5), (jitter, 0.8), (add_noise, 0.16)):
        clips = damage(clips, strength * (1 - done), generator)
    found = []
    with TemporaryDirectory() as folder:
        file = Path(folder) / "clip.mp4"
        for prompt, clip in zip(captions(scenes), clips, strict=True):
            write_mp4(file, (clip * 255).round().to(torch.uint8), fps=8)
            found.append((prompt, file.read_bytes()))
    return found


def validation_line(step: int, entries: list[dict[str, Any]]) -> dict[str, Any]:
    line: dict[str, Any] = {
        "kind": "validation",
        "step": step,
        "count": len(entries),
        "time/validation": 31.0,
    }
    line["signal/rescoring"] = 0.0
    for part, prefix in (("scores", "reward"), ("gold", "gold")):
        for name in entries[0][part]:
            values = np.array([entry[part][name] for entry in entries])
            line[f"{prefix}/{name}"] = float(values.mean())
            line[f"{prefix}/{name}_stderr"] = float(values.std(ddof=1) / math.sqrt(len(values)))
    return line
