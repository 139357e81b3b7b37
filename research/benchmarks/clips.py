"""Clips per GPU-hour at full size, side by side in one run: all steps trained, cheap rollouts, rivals without an SDE.

    python -m research.benchmarks.random_model --output /tmp/random_model
    python -m research.benchmarks.clips --output research/benchmarks/results/DATE-clips-h200.md \\
        --config configs/hunyuan15_1gpu_lora.yaml --pretrained_model_root /tmp/random_model

Each way runs one iteration of the unmodified trainer, whose anchor is not the policy, after every graph was compiled.
A synthetic reward costs nothing. `all steps` trains a tenth of the steps of two clips; what the others would have cost
is added and marked. The last column compares forwards and a decode on two streams with one after the other, for the
first way alone. Flags of post_train.py apply to all ways. Ways that the page has are not measured again, so a long list
can be split over calls.
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

from research.benchmarks.grpo import PHASES, Contrast, measure, trainer_overhead
from sage_grpo.config.parse import parse
from sage_grpo.parallel.ranks import Ranks, join_ranks
from sage_grpo.rewards.registry import REWARDS
from sage_grpo.train.build import build_trainer
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.windows import num_trained

ALL = "--sde_window all --same_init_noise False --tail_steps 0 --decode_gb 0"
RIVAL = "--sde_window all --same_init_noise False --tail_steps 10 --timestep_fraction 0.15 --kl_weight 0.3"
EIGHT = "--batch_size 8 --num_generations 8"
WAYS = {
    "all steps": f"{ALL} --batch_size 2 --num_generations 2 --timestep_fraction 0.1",
    "recipe": "",
    "recipe, guidance 1": "--guidance_scale 1",
    "recipe, fp8": "--outside_window fp8",
    "recipe, 2 of 8": f"{EIGHT} --train_clips 2",
    **{
        f"{algorithm}{trained}{guidance}": f"--algorithm {algorithm} {RIVAL}{flags}{guidance_flag}"
        for algorithm in ("nft", "awm")
        for guidance, guidance_flag in {"": "", ", guidance 1": " --guidance_scale 1"}.items()
        for trained, flags in {"": "", ", 2 of 8": f" {EIGHT} --train_clips 2"}.items()
    },
}
FIXED = (
    "--reward_model contrast --report_to none --log_interval 1 --max_steps 1 --gradient_accumulation_steps 1 "
    "--save_interval 0 --validation_interval 0 --validation_videos 0"
)
TITLES = (
    "way",
    "clips",
    *(f"{phase}, s" for phase in PHASES),
    "a clip, s",
    "clips per GPU-hour",
    "trainer's share",
    "forward, s",
    "outside the window, s",
    "peak GB",
    "largest ratio deviation",
    "two streams",
)
REPEATS = 3


@dataclass(frozen=True)
class Warmed:
    """Times that are measured while the graphs are compiled."""

    forward: float  # seconds, with all branches of the guidance
    lossy: float  # seconds of a forward outside the window
    # forwards and a decode on two streams, relative to one after the other; None: not measured
    overlap: float | None


@dataclass(frozen=True)
class Result:
    """Seconds of one iteration by phase, and what the transformer took of them."""

    seconds: dict[str, float]
    clips: int
    overhead: float  # of the trainer, relative to the transformer
    peak: float  # GB
    deviation: float  # of the ratio from 1
    warmed: Warmed

    def row(self, name: str) -> str:
        """A row of the page; its columns are TITLES."""
        total = sum(self.seconds.values())
        cells = [name, str(self.clips)]
        cells += [f"{self.seconds[phase] / self.clips:.2f}" for phase in PHASES]
        cells += [
            f"{total / self.clips:.1f}",
            f"**{3600 * self.clips / total:.0f}**",
            f"{self.overhead:.2%}",
            f"{self.warmed.forward:.3f}",
            f"{self.warmed.lossy:.3f}",
            f"{self.peak:.1f}",
            f"{self.deviation:.3g}",
            "" if self.warmed.overlap is None else f"{self.warmed.overlap:.2f}",
        ]
        return f"| {' | '.join(cells)} |"


def seconds_of(call: Callable[[], object]) -> float:
    """Mean seconds over a few calls, after one that does not count."""
    call()
    synchronize()
    begin = time.perf_counter()
    for _ in range(REPEATS):
        call()
    synchronize()
    return (time.perf_counter() - begin) / REPEATS


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def side_by_side(first: Callable[[], object], second: Callable[[], object]) -> None:
    """Run both at once: the second from a thread, on a stream of its own."""
    stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def run() -> None:
        with torch.no_grad(), torch.cuda.stream(stream):
            second()

    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(run)
        first()
        beside.result()  # raises what went wrong there


def warm(trainer: Trainer, two_streams: bool) -> Warmed:
    """Compile every graph that the iteration needs, and make the anchor older than the policy.

    two_streams: whether forwards beside a decode are timed as well.
    """
    backbone = trainer.backbone
    device = trainer.ranks.device
    (cond,) = backbone.encode([trainer.requests[0]])
    x = torch.randn(1, *backbone.free_shape(trainer.shape, cond), device=device)

    def forward(level: float = 0.5) -> Tensor:
        sigma = torch.full((1,), level, device=device)
        return backbone.velocity(x, sigma, cond, trainer.guidance)

    def two_forwards() -> None:
        forward()
        forward()

    def decode() -> Tensor:
        return backbone.decode(backbone.full_latents(x, cond))

    overlap = None
    with trainer.keep_unsharded(), torch.no_grad():
        if len(backbone.experts) > 1:
            forward(1.0)  # the transformer for high noise levels
        exact = seconds_of(forward)
        with backbone.transformer.lossy():
            lossy = seconds_of(forward)
        with trainer.anchor.active():
            forward()
        if two_streams:
            one_by_one = seconds_of(two_forwards) + seconds_of(decode)
            at_once = seconds_of(lambda: side_by_side(two_forwards, decode))
            overlap = at_once / one_by_one
        else:
            decode()
    forward().square().mean().backward()
    trainer.optimization.zero_grad()
    trainer.anchor.age += 1
    return Warmed(forward=exact, lossy=lossy, overlap=overlap)


def run(name: str, flags: list[str], ranks: Ranks, folder: Path, two_streams: bool) -> Result:
    """One iteration of a way; `two_streams` as for `warm`."""
    place = ["--output_dir", str(folder / name.replace(" ", "_"))]
    config = parse([*flags, *FIXED.split(), *WAYS[name].split(), *place])
    trainer = build_trainer(config, ranks)
    trainer.validation = None
    warmed = warm(trainer, two_streams)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    (record,), (inside,) = measure(trainer)
    trainer.run.close()

    seconds = {phase: record[f"time/{phase}"] for phase in PHASES}
    overhead = trainer_overhead(seconds, inside)
    if name == "all steps":
        steps = trainer.windows.size
        untrained_factor = steps / num_trained(steps, config.timestep_fraction)
        seconds["anchor"] *= untrained_factor
        seconds["update"] *= untrained_factor
    return Result(
        seconds=seconds,
        clips=config.batch_size,
        overhead=overhead,
        peak=record["memory/peak_gb"],
        deviation=record["policy/ratio_max_deviation"],
        warmed=warmed,
    )


def measured_rows(page: Path) -> dict[str, str]:
    """The rows that a page has, by way; none if there is no page."""
    if not page.is_file():
        return {}
    cells = {
        line: line.removeprefix("| ").split(" | ")[0] for line in page.read_text().splitlines()
    }
    return {way: line for line, way in cells.items() if way in WAYS}


def options_of(
    about: str, ways: Iterable[str], arguments: list[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """The page and the ways to measure, and the flags of post_train.py."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="page to write")
    parser.add_argument("--ways", nargs="*", choices=ways, default=list(ways), help="default: all")
    return parser.parse_known_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options, flags = options_of(__doc__, WAYS, arguments)
    REWARDS["contrast"] = lambda setup: Contrast()
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    lines = [
        f"# Clips per GPU-hour, {where}, {datetime.date.today()}", "",
        f"    {shlex.join(['python', *sys.orig_argv[1:]])}", "",
        f"torch {torch.__version__}. Seconds of the phases are per clip; a forward has all branches of the guidance. "
        "All steps: a tenth of them was trained, and the anchor's and the update's seconds multiplied by 10.", "",
        f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|",
    ]  # fmt: skip
    earlier = measured_rows(options.output)
    sharded = parse(flags).enable_fsdp
    with tempfile.TemporaryDirectory() as scratch, join_ranks(600, sharded=sharded) as ranks:
        lines += earlier.values()
        for name in (way for way in options.ways if way not in earlier):
            is_first = not measured_rows(options.output)
            lines.append(run(name, flags, ranks, Path(scratch), is_first).row(name))
            print(lines[-1], flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            torch.compiler.reset()
            options.output.write_text("\n".join(lines) + "\n")  # after each way: the next may fail


if __name__ == "__main__":
    main()
