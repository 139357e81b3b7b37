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
from dataclasses import asdict, replace
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

from sage_grpo.files.json_files import write_json
from sage_grpo.parallel.device import choose_device
from sage_grpo.runs.media import contact_sheet, read_mp4, thumbnails
from sage_grpo.tools.audit import (
    EDITS,
    TOTAL,
    audit_summary,
    conclude,
    drawn_clips,
    edited,
    give_verdicts,
    measure,
)
from sage_grpo.tools.evaluate import read_folder
from sage_grpo.train.build import open_model
from sage_grpo.train.inputs import build_composite, prompts_of, reward_names


def good_clips(
    options: argparse.Namespace, config: Config, device: torch.device
) -> tuple[list, list, float, list]:
    """Clips, prompts and fps; of a world also the clips at half the speed, which it can render."""
    entries = [entry for folder in options.clips for entry in read_folder(folder)][
        : options.num_clips
    ]
    if entries:
        clips, rates = zip(*(read_mp4(Path(entry["file"])) for entry in entries), strict=True)
        if len(set(rates)) > 1:
            raise ConfigError(
                "the clips have several frame rates; the reward would see more of some than of others"
            )
        return list(clips), [entry["prompt"] for entry in entries], rates[0], []
    _, c = open_model(config, device)
    prompts = prompts_of(c.train_prompts, Path(c.pretrained_model_root), "train")
    drawn = drawn_clips(c, prompts, options.num_clips)
    if drawn is None:
        raise ConfigError(
            "this model has no world that can draw a clip known to be good: name a folder with --clips"
        )
    longer, _ = drawn_clips(replace(c, num_frames=2 * c.num_frames - 1), prompts, options.num_clips)
    return *drawn, c.fps, [clip[: c.num_frames] for clip in longer]


@answering("audit_reward: ")
def main(arguments: Sequence[str] | None = None) -> int:
    options, config = parse_arguments(arguments)
    device = torch.device(choose_device(config.device, lambda: 0))
    clips, prompts, fps, slowed = good_clips(options, config, device)
    if len(clips) < 8:
        raise ConfigError(
            f"{len(clips)} clips are too few to tell; give at least 8, with different prompts"
        )
    reward = build_composite(config, reward_names(config), config.reward_weights, device)
    reward.check(prompts)
    kinds = dict.fromkeys(EDITS, ()) | {"slowed": slowed}
    found = measure(reward, clips, prompts, fps, kinds)
    told = conclude(found, verdicts := give_verdicts(found, drawn=not options.clips))
    options.output.mkdir(parents=True, exist_ok=True)
    rows = {kind: (kinds[kind] or edited(clips[:1], kind))[0] for kind in kinds}
    marks = {
        v.edit: f"{v.change.mean:+.3f} +- {v.change.half:.3f} {v.mark}"
        for v in verdicts
        if v.score == TOTAL
    }
    sheet = [thumbnails(clip) for clip in (clips[0], *rows.values())]
    contact_sheet(
        options.output / "sheet.png",
        sheet,
        ["good", *(f"{kind}: total {marks[kind]}" for kind in rows)],
    )
    record = {"clips": len(clips), "weights": reward.weights, "fit": not told["wrong"]} | told
    write_json(
        options.output / "audit.json",
        record | {"verdicts": [asdict(v) | {"mark": v.mark} for v in verdicts]},
    )
    print(audit_summary(found, verdicts, told, options.output))
    return 1 if told["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
