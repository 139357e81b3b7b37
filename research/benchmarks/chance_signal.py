"""Is `signal/gradient` 0 for a reward that is pure chance?

    python -m research.benchmarks.chance_signal                 minutes on a CPU
    python -m research.benchmarks.chance_signal --iterations 1600 --algorithms nft
    python -m research.benchmarks.chance_signal --algorithms awm nft --prompts 2 --accumulation 2 --seeds 1 2 3

The reward is a checksum of the clip: it is the same whenever a clip is scored, but nothing about it can be learned, so
no part of a gradient is signal. Iterations are the real trainer's, on a policy of 8,899 parameters; their shares are
averaged as the diagnosis does, weighted by the squared norm of the gradient. The interval should contain
0 for every algorithm, for updates of one and of two groups of clips, made of one iteration or of two. With awm and nft,
one group in one update has no independent halves, and its signal is not known.

Why it should: let a and b be the gradients of the two halves. Given the clips, chance orders the rewards of a group
anyhow, so each group's gradient has mean 0, and those of different groups are independent: E a.b = 0. That advantages
of a group add up to 0 ties clips of one group only, and a half holds whole groups. The share of n updates is
the sum of 2 (|b|^2 - |a|^2) + 4 a.b over that of |a + b|^2. Its mean is about -2 / (n d) for gradients that point in
d directions, because a.b is in the denominator too: less than 1 / sqrt(n d) of its own standard error.
"""

import argparse
import json
import math
import tempfile
import zlib
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sage_grpo.config.fields import Config
from sage_grpo.config.parse import from_values
from sage_grpo.models.registry import BACKBONES
from sage_grpo.rewards.registry import REWARDS
from sage_grpo.runs.case import gradient_signal
from sage_grpo.train.build import build_trainer, join_run
from tests.trivial_backbone import Block, TinyDenoiser, Trivial

ALGORITHMS = ("grpo", "awm", "nft")
PIPELINE = "WidePipeline"
WIDTH = 64
FLAGS = {
    "reward_model": "checksum", "report_to": "none", "save_interval": 0, "validation_interval": 0, "overwrite": True,
    "enable_gradient_checkpointing": False, "dtype": "fp32", "sde_window": "all_but_last", "guidance_scale": 1.0,
    "num_sampling_steps": 3, "num_frames": 1, "height": 4, "width": 4, "num_generations": 8, "micro_batch_size": 4,
    "learning_rate": 1e-4, "kl_weight": 0.0, "use_lora": False,
}  # fmt: skip


class Checksum:
    """A reward that is chance, but the same for the same clip."""

    names = ("checksum",)

    def check(self, prompts: list[str]) -> None:
        pass

    def score(self, clips: list[Tensor], prompts: list[str], fps: float) -> dict[str, Tensor]:
        """Scores (B,) of uint8 clips (F, H, W, 3)."""
        sums = [zlib.crc32(clip.numpy().tobytes()) / 2**32 for clip in clips]
        return {"checksum": torch.tensor(sums, dtype=torch.float64)}


class WideBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)


class WideDenoiser(TinyDenoiser):
    """The trivial model, but wide enough that its gradients point in many directions."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, WIDTH)
        self.leave = nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList([WideBlock(), WideBlock()])


class Wide(Trivial):
    def empty_transformer(self) -> nn.Module:
        with torch.device("meta"):
            return WideDenoiser()


def write_model(folder: Path) -> None:
    """A model folder with random weights and a few prompts."""
    (folder / "transformer").mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": PIPELINE}))
    (folder / "prompts.txt").write_text("a wall\na door\na roof\na floor\n")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = WideDenoiser().state_dict()
    save_file(weights, folder / "transformer" / "diffusion_pytorch_model.safetensors")


def measure(
    folder: Path,
    algorithm: str,
    prompts: int,
    accumulation: int,
    iterations: int,
    seed: int = Config().seed,
) -> tuple[float, float]:
    """Share of signal and its standard error, over a run of `iterations` on `prompts` x 8 clips each."""
    BACKBONES[PIPELINE] = f"{__name__}:Wide"
    REWARDS["checksum"] = lambda setup: Checksum()
    model = folder / "model"
    if not model.is_dir():
        write_model(model)

    run = folder / f"{algorithm}-{prompts}-{accumulation}-{seed}"
    changes = {
        "pretrained_model_root": str(model),
        "train_prompts": str(model / "prompts.txt"),
        "validation_prompts": str(model / "prompts.txt"),
        "output_dir": str(run),
        "algorithm": algorithm,
        "batch_size": 8 * prompts,
        "gradient_accumulation_steps": accumulation,
        "max_steps": iterations,
        "seed": seed,
    }
    config = from_values(FLAGS | changes)
    lines = []
    with join_run(config) as ranks:
        trainer = build_trainer(config, ranks)
        for _ in range(iterations):
            batch = trainer.roll_out()
            scores = trainer.score(batch, trainer.decode(batch))
            record = trainer.update(*trainer.select(batch, trainer.advantages(scores)))
            trainer.state.step += 1
            lines.append(record | {"signal/gradient": trainer.half_gradient.signal_fraction})
        trainer.run.close()
    return gradient_signal(lines)


def signal_text(share: float, error: float) -> str:
    return "not known" if math.isnan(share) else f"{share:+.1%} ± {error:.1%}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--prompts", nargs="+", type=int, default=(2, 1), help="per iteration")
    parser.add_argument(
        "--accumulation", nargs="+", type=int, default=(1, 2), help="iterations per update"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=(Config().seed,))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)

    print("| algorithm | prompts x clips | iterations per update | seed | signal, standard error |")
    print("|---|---|---|---|---|")
    cases = product(options.algorithms, options.prompts, options.accumulation, options.seeds)
    with tempfile.TemporaryDirectory() as folder:
        for algorithm, prompts, accumulation, seed in cases:
            share, error = measure(
                Path(folder), algorithm, prompts, accumulation, options.iterations, seed
            )
            text = signal_text(share, error)
            print(f"| {algorithm} | {prompts} x 8 | {accumulation} | {seed} | {text} |", flush=True)


if __name__ == "__main__":
    main()
