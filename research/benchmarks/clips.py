"""Clips per GPU-hour at full size, side by side in one run: all steps trained, cheap rollouts, rivals without an SDE.

    python -m research.benchmarks.random_model --output /tmp/random_model
    python -m research.benchmarks.clips --output research/benchmarks/DATE-clips-h200.md --config configs/hunyuan15_1gpu_lora.yaml \
        --pretrained_model_root /tmp/random_model

Each way runs one iteration of the unmodified trainer, whose anchor is not the policy, after every graph was compiled.
A synthetic reward costs nothing. `all steps` trains a tenth of the steps of two clips; what the others would have cost
is added and marked. The last column compares forwards and a decode on two streams with one after the other. Flags of
post_train.py apply to all ways.
"""

import argparse
import datetime
import gc
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from research.benchmarks.grpo import IN_MODEL, PHASES, Contrast, measure
from sage_grpo.config.parse import parse
from sage_grpo.parallel.ranks import Ranks, join_ranks
from sage_grpo.rewards.registry import REWARDS
from sage_grpo.train.build import build_trainer
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.windows import num_trained

ALL = "--sde_window all --same_init_noise False --tail_steps 0 --decode_gb 0"
RIVAL = "--sde_window all --same_init_noise False --tail_steps 10 --timestep_fraction 0.15 --kl_weight 0.3"
WAYS = {
    "all steps": f"{ALL} --batch_size 2 --num_generations 2 --timestep_fraction 0.1",
    "recipe": "",
    "recipe, guidance 1": "--guidance_scale 1",
    "recipe, fp8": "--outside_window fp8",
    "awm": f"--algorithm awm {RIVAL}",
    "awm, guidance 1": f"--algorithm awm {RIVAL} --guidance_scale 1",
    "nft": f"--algorithm nft {RIVAL}",
}
REPEATS = 3


@dataclass
class Result:
    """Seconds of one iteration by phase, and what the transformer took of them."""

    seconds: dict[str, float]
    clips: int
    overhead: float  # of the trainer, relative to the transformer
    peak: float  # GB
    forward: float
    lossy: float  # the same, outside the window
    deviation: float  # of the ratio from 1
    overlap: (
        float  # seconds of a forward and a decode on two streams, relative to one after the other
    )

    def row(self, name: str) -> str:
        total = sum(self.seconds.values())
        cells = [f"{self.seconds[phase] / self.clips:.2f}" for phase in PHASES]
        cells += [
            f"{total / self.clips:.1f}",
            f"**{3600 * self.clips / total:.0f}**",
            f"{self.overhead:.2%}",
        ]
        cells += [
            f"{self.forward:.3f}",
            f"{self.lossy:.3f}",
            f"{self.peak:.1f}",
            f"{self.deviation:.3g}",
        ]
        cells.append(f"{self.overlap:.2f}")
        return f"| {name} | {self.clips} | " + " | ".join(cells) + " |"


def seconds_of(call: Callable[[], object]) -> float:
    """The mean over a few calls, after one that does not count."""
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(REPEATS):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / REPEATS


def side_by_side(first: Callable[[], object], second: Callable[[], object]) -> None:
    """Both at once: the second from a thread, on a stream of its own."""
    stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def run() -> None:
        with torch.no_grad(), torch.cuda.stream(stream):
            second()

    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(run)
        first()
        beside.result()  # raises what went wrong there


def warm(trainer: Trainer) -> tuple[float, float, float]:
    """Compile every graph that the iteration needs.

    Returns the seconds of a forward, exact and outside the window, and of a forward beside a decode, relative to both
    one after the other.
    """
    backbone, device = trainer.backbone, trainer.ranks.device
    x, sigma = torch.randn(1, *trainer.shape, device=device), torch.full((1,), 0.5, device=device)
    (cond,) = backbone.encode([trainer.requests[0]])

    def forward() -> Tensor:
        return backbone.velocity(x, sigma, cond, trainer.guidance)

    with trainer.gathered(), torch.no_grad():
        exact = seconds_of(forward)
        with backbone.transformer.lossy():
            lossy = seconds_of(forward)
        with trainer.anchor.in_place():
            forward()
        few = [lambda: [forward() for _ in range(2)], lambda: backbone.decode(x)]
        apart = sum(map(seconds_of, few))
        overlap = seconds_of(lambda: side_by_side(*few)) / apart
    forward().square().mean().backward()
    trainer.optimization.zero_grad()
    trainer.anchor.age += 1  # as if it were older than the policy
    return exact, lossy, overlap


def run(name: str, flags: list[str], ranks: Ranks, folder: Path) -> Result:
    fixed = "--reward_model contrast --report_to none --log_interval 1 --max_steps 1 --gradient_accumulation_steps 1"
    fixed += " --save_interval 0 --validation_interval 0 --validation_videos 0"
    config = parse(
        [
            *flags,
            *fixed.split(),
            *WAYS[name].split(),
            "--output_dir",
            str(folder / name.replace(" ", "_")),
        ]
    )
    trainer = build_trainer(config, ranks)
    trainer.validation = None
    forward, lossy, overlap = warm(trainer)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    (record,), (inside,) = measure(trainer)
    seconds = {phase: record[f"time/{phase}"] for phase in PHASES}
    overhead = (
        sum(seconds[phase] for phase in IN_MODEL) / sum(inside[phase] for phase in IN_MODEL) - 1
    )
    if name == "all steps":
        for phase in ("anchor", "update"):
            seconds[phase] *= trainer.windows.size / num_trained(
                trainer.windows.size, config.timestep_fraction
            )
    result = Result(
        seconds, config.batch_size, overhead, record["memory/peak_gb"], forward, lossy,
        record["policy/ratio_max_deviation"], overlap,
    )  # fmt: skip
    trainer.run.close()
    return result


def options_of(
    about: str, ways: Iterable[str], arguments: list[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """The page and the ways to measure, and the flags of post_train.py."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--ways", nargs="*", choices=ways, default=list(ways))
    return parser.parse_known_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options, flags = options_of(__doc__, WAYS, arguments)
    REWARDS["contrast"] = lambda setup: Contrast()
    titles = [
        "way",
        "clips",
        *(f"{phase}, s" for phase in PHASES),
        "a clip, s",
        "clips per GPU-hour",
        "trainer's share",
    ]
    titles += [
        "forward, s",
        "outside the window, s",
        "peak GB",
        "largest ratio deviation",
        "two streams",
    ]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    lines = [
        f"# Clips per GPU-hour, {where}, {datetime.date.today()}", "",
        f"    {shlex.join(['python', *sys.orig_argv[1:]])}", "",
        f"torch {torch.__version__}. Seconds of the phases are per clip; a forward has all branches of the guidance. "
        "All steps: a tenth of them was trained, and the anchor's and the update's seconds multiplied by 10.", "",
        f"| {' | '.join(titles)} |", "|---" * len(titles) + "|",
    ]  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as scratch,
        join_ranks(600, sharded=parse(flags).enable_fsdp) as ranks,
    ):
        for name in options.ways:
            lines.append(run(name, flags, ranks, Path(scratch)).row(name))
            print(lines[-1], flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            torch.compiler.reset()
            options.output.write_text("\n".join(lines) + "\n")  # after each way: the next may fail


if __name__ == "__main__":
    main()
