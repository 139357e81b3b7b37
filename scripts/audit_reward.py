"""Audits a reward before a long run: known edits of good clips must not raise it, and damage must lower it.

    python scripts/audit_reward.py --config FILE.yaml [--FLAG VALUE ...]     (any flag of post_train.py)
    python scripts/audit_reward.py --reward_model videoalign --clips FOLDER  (good mp4 files with prompts)

Clips are rendered by the model's world, or read from folders as generate.py writes them. Every change is paired by
clip, and verdicts come from 95 % intervals over clips. Writes audit.json and sheet.png. Exit code 0: fit for training;
1: a verdict is wrong; 2: the configuration or a file is wrong, or there are too few clips.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sage_grpo.config.command_line import answer_early, answering
from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.tools.options import ToolParser


def parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    """Parse this tool's flags, and all others as flags of post_train.py."""
    parser = ToolParser("python scripts/audit_reward.py", __doc__)
    parser.add_argument(
        "--clips",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        default=[],
        help="folders of good clips (default: clips rendered by the model's world)",
    )
    parser.add_argument(
        "--num_clips",
        type=int,
        metavar="N",
        default=32,
        above=0,
        help="maximum number of clips to use",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        default=Path("outputs/audit"),
        help="folder for numbers and pictures",
    )
    return parser.parse_with_config(arguments)


answer_early(__name__, parse_arguments)

import torch
from torch import Tensor

from sage_grpo.exit_codes import DONE, FAILED
from sage_grpo.files.json_files import write_json
from sage_grpo.files.paths import check_folder, make_folder
from sage_grpo.intervals import MIN_PAIRS
from sage_grpo.parallel.device import choose_device
from sage_grpo.rewards.base import Requests
from sage_grpo.runs.media import contact_sheet, read_mp4, thumbnails
from sage_grpo.tools.audit import (
    EDITS,
    TOTAL,
    Verdict,
    audit_summary,
    conclude,
    drawn_clips,
    edited,
    give_verdicts,
    measure,
)
from sage_grpo.tools.evaluate import read_folder
from sage_grpo.train.build import open_model
from sage_grpo.train.inputs import build_composite, requests_from, reward_names


@dataclass(frozen=True)
class GoodClips:
    """Clips that are known to be good."""

    clips: list[Tensor]  # uint8 (F, H, W, 3)
    requests: Requests
    fps: float
    slowed: list[Tensor]  # the same at half the speed; empty unless a world rendered them


def read_clips(folders: Sequence[Path], count: int) -> GoodClips:
    """The first clips in folders that generate.py wrote."""
    entries = [entry for folder in folders for entry in read_folder(folder)]
    clips = []
    prompts = []
    rates = set()
    for entry in entries[:count]:
        clip, fps = read_mp4(Path(entry["file"]))
        clips.append(clip)
        prompts.append(entry["prompt"])
        rates.add(fps)
    if len(rates) != 1:
        raise ConfigError(
            "the clips have several frame rates; the reward would see more of some than of others"
        )
    return GoodClips(clips, prompts, fps=rates.pop(), slowed=[])


def render_clips(config: Config, device: torch.device, count: int) -> GoodClips:
    """Clips of training prompts, rendered by the model's world."""
    _, c = open_model(config, device)
    prompts = requests_from(c.train_prompts, Path(c.pretrained_model_root), "train")
    drawn = drawn_clips(c, prompts, count)
    if drawn is None:
        raise ConfigError(
            "this model has no world that can draw a clip known to be good: "
            "name a folder with --clips"
        )
    clips, requests = drawn
    twice_as_long = replace(c, num_frames=2 * c.num_frames - 1)
    longer, _ = drawn_clips(twice_as_long, prompts, count)
    return GoodClips(clips, requests, c.fps, slowed=[clip[: c.num_frames] for clip in longer])


@answering("audit_reward: ")
def main(arguments: Sequence[str] | None = None) -> int:
    options, config = parse_arguments(arguments)
    check_folder(options.output, "output")
    device = torch.device(choose_device(config.device, lambda: 0))
    if options.clips:
        good = read_clips(options.clips, options.num_clips)
    else:
        good = render_clips(config, device, options.num_clips)
    if len(good.clips) < MIN_PAIRS:
        raise ConfigError(
            f"{len(good.clips)} clips are too few to tell; "
            f"give at least {MIN_PAIRS}, with different prompts"
        )

    reward = build_composite(config, reward_names(config), config.reward_weights, device)
    reward.check(good.requests)
    kinds = dict.fromkeys(EDITS, ()) | {"slowed": good.slowed}
    scores = measure(reward, good.clips, good.requests, good.fps, kinds)
    verdicts = give_verdicts(scores, drawn=not options.clips)
    conclusions = conclude(scores, verdicts)

    make_folder(options.output, "output")
    write_sheet(options.output / "sheet.png", good, verdicts)
    record = {
        "clips": len(good.clips),
        "weights": reward.weights,
        "fit": not conclusions["wrong"],
        **conclusions,
        "verdicts": [asdict(verdict) | {"mark": verdict.mark} for verdict in verdicts],
    }
    write_json(options.output / "audit.json", record)
    print(audit_summary(scores, verdicts, conclusions, options.output))
    return FAILED if conclusions["wrong"] else DONE


def write_sheet(path: Path, good: GoodClips, verdicts: Sequence[Verdict]) -> None:
    """The first clip, and what each edit makes of it and of the total."""
    totals = {verdict.edit: verdict for verdict in verdicts if verdict.score == TOTAL}
    rows = [thumbnails(good.clips[0])]
    labels = ["good"]
    for kind in EDITS:
        if kind == "slowed" and good.slowed:
            clip = good.slowed[0]
        else:
            (clip,) = edited(good.clips[:1], kind)
        rows.append(thumbnails(clip))
        total = totals[kind]
        change = f"{total.change.mean:+.3f} +- {total.change.half:.3f}"
        labels.append(f"{kind}: total {change} {total.mark}")
    contact_sheet(path, rows, labels)


if __name__ == "__main__":
    sys.exit(main())
