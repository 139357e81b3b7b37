"""`prefer learn` at full size with random weights: what the planner says beforehand, and what it takes on this machine.

    python -m research.benchmarks.prefer_learn --output research/benchmarks/results/DATE-prefer-learn-h200.md

Heads and LoRA learn from random answers about clips of noise, LoRA for one epoch, and the rewards that they wrote are
loaded again. Minutes on one GPU. `--rehearse` takes a tiny reward and small clips, on a CPU. `--base FOLDER` keeps the
random reward for the next call. No ffmpeg is needed: clips are put into the store of `learn` as patches.
"""

import argparse
import datetime
import io
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch

from research.benchmarks.random_model import prompt_words
from research.benchmarks.random_reward import write_reward
from research.benchmarks.random_weights import Writer
from sage_grpo.rewards.videoalign.reward import VideoAlign
from sage_grpo.tools.prefer.__main__ import main as prefer
from sage_grpo.tools.prefer.__main__ import parse_learn
from sage_grpo.tools.prefer.answers import AnswersFile
from sage_grpo.tools.prefer.learn import clips_key, prepare_draft
from sage_grpo.tools.prefer.pairs import Trial
from sage_grpo.tools.prefer.study import Study, StudyClip, clips_folder
from sage_grpo.tools.prefer.study_clips import StudyClips, write_at_once

# flags of each
METHODS: dict[str, tuple[str, ...]] = {"heads": (), "lora": ("--epochs", "1")}


@dataclass(frozen=True)
class Size:
    """Numbers and sizes of the study's clips."""

    prompts: int  # two clips each
    frames: int
    height: int
    width: int
    fps: float


FULL = Size(prompts=24, frames=121, height=480, width=848, fps=24.0)
TINY = Size(prompts=12, frames=9, height=48, width=48, fps=8.0)


def write_study(file: Path, size: Size) -> Study:
    """A study of two clips per prompt, answered at random."""
    clips_folder(file).mkdir(parents=True)
    prompts = [" ".join(prompt_words()[i : i + 8]) for i in range(size.prompts)]
    clips = tuple(StudyClip(f"{i}.mp4", 0, prompts[i // 2]) for i in range(2 * size.prompts))
    pairs = tuple((2 * i, 2 * i + 1) for i in range(size.prompts))
    for clip in clips:
        (clips_folder(file) / clip.file).touch()  # what they would hold is put into the store
    study = Study(("base",), ("vq", "mq"), clips, pairs, repeat=0.0)
    answers = AnswersFile(file, study)
    generator = torch.Generator().manual_seed(0)
    for pair in range(size.prompts):
        sides = torch.randint(2, (2,), generator=generator).tolist()
        choices = {
            name: ("left", "right")[side] for name, side in zip(("vq", "mq"), sides, strict=True)
        }
        answers.add("ann", pair, Trial(pair, swapped=False), choices, 1.0)
    answers.close()
    return study


def fill_store(clips: StudyClips, size: Size) -> None:
    """Put clips of noise into the store."""
    prepare_draft(clips.store)
    shape = (size.frames, size.height, size.width, 3)
    generator = torch.Generator().manual_seed(0)
    for number in range(len(clips.study.clips)):
        video = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        patches, grid = clips.cut(video, size.fps, number)
        file = clips.store / f"{clips.key}-clip-{number:06d}.safetensors"
        write_at_once(file, {"patches": patches.cpu().contiguous(), "grid": torch.tensor(grid)})


def write_base(base: Path, rehearse: bool, device: str) -> None:
    """Write a random reward, unless an earlier call has."""
    if base.is_dir():
        return
    draft = base.with_name(f"{base.name}-partial")
    shutil.rmtree(draft, ignore_errors=True)  # of a call that was stopped
    writer = Writer(torch.device(device))
    write_reward(draft, rehearse, prompt_words(), writer)
    writer.finish()
    draft.rename(base)


def measure(
    folder: Path, base: Path, study: Study, size: Size, method: str, device: str
) -> dict[str, str]:
    """A row: what `learn` said beforehand, and what it took."""
    output = folder / method
    words = [str(folder / "prefs.jsonl"), "--base", str(base), "--output", str(output)]
    words += ["--method", method, "--device", device, "--even_if_worse", *METHODS[method]]
    options = parse_learn(words)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    store = output.with_name(f"{method}.partial")
    reward = VideoAlign(base, device, dtype)
    key = clips_key(options, study, device, dtype)
    fill_store(StudyClips(reward, study, options.answers, store, key), size)
    del reward

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    said = io.StringIO()
    begin = time.perf_counter()
    with redirect_stdout(said):
        code = prefer(["learn", *words])
    seconds = time.perf_counter() - begin
    if code != 0:
        raise RuntimeError(f"`learn --method {method}` ended with exit code {code}")
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else float("nan")
    VideoAlign(output, device, dtype)  # what was written can be read
    plan = said.getvalue().splitlines()[0]
    shutil.rmtree(output)
    return {
        "method": method,
        "planned": plan,
        "minutes": f"{seconds / 60:.2f}",
        "peak GB": f"{peak:.1f}",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="page to write, .md")
    parser.add_argument("--base", type=Path, help="folder of the random reward, written if missing")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--write_only", action="store_true", help="write the base, learn nothing")
    options = parser.parse_args(arguments)
    if options.write_only and not options.base:
        parser.error("--write_only needs --base")
    if not options.write_only and not options.output:
        parser.error("--output is missing")
    size = TINY if options.rehearse else FULL
    device = "cpu" if options.rehearse else "cuda"

    if options.write_only:
        write_base(options.base, options.rehearse, device)
        return

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base = options.base or folder / "VideoReward"
        write_base(base, options.rehearse, device)
        study = write_study(folder / "prefs.jsonl", size)
        rows = [measure(folder, base, study, size, method, device) for method in METHODS]

    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {platform.machine()}"
    lines = [
        "# `prefer learn` with random weights",
        "",
        f"{datetime.date.today()}, {name}, torch {torch.__version__}; "
        f"{2 * size.prompts} clips of {size.frames} x {size.height} x {size.width}, "
        f"{2 * size.prompts} answers; one epoch of the adapter.",
        "",
        f"    python -m research.benchmarks.prefer_learn {shlex.join(arguments or sys.argv[1:])}",
        "",
        f"| {' | '.join(rows[0])} |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row.values())} |" for row in rows),
    ]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("\n".join(lines) + "\n")
    print(options.output.read_text())


if __name__ == "__main__":
    main()
