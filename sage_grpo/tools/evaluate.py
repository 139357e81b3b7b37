"""Compares checkpoints with the base model, or folders of clips: same prompts, seeds and rewards for all.

    python -m sage_grpo.tools.evaluate --config RUN/config.yaml --checkpoints RUN/checkpoints/step-000100 \\
        --reward_model videoalign clipscore pickscore
    python -m sage_grpo.tools.evaluate --clips OURS THEIRS --reward_model videoalign

Takes every flag of post_train.py; the validation flags control how clips are made, and reward_weights are ignored. Each
clip is saved with its scores right away, so a second call continues where the first one stopped. Under torchrun every
process has a full model and its share of the prompts. Exit code 0: done; 1: a score is missing; 2: the configuration
or a file is wrong.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_grpo.config.command_line import answer_early, answering
from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.tools.options import ToolParser


def parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    """Parse this tool's flags, and all others as flags of post_train.py."""
    parser = ToolParser("python -m sage_grpo.tools.evaluate", __doc__)
    parser.add_argument(
        "--checkpoints",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        default=[],
        help="weights to compare with the base model",
    )
    parser.add_argument(
        "--clips",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        default=[],
        help="folders of mp4 files, with one clips.json or a JSON file per clip",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        metavar="N",
        help="one clip per prompt and seed (default: the prompt's own seed, or validation_global_seed)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        default=Path("outputs/evaluation"),
        help="folder for clips and pages",
    )
    return parser.parse_with_config(arguments)


answer_early(__name__, parse_arguments)

from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from sage_grpo.data.requests import Request
from sage_grpo.files.json_files import read_object, write_json
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.registry import device_for
from sage_grpo.parallel.ranks import Ranks, join_ranks
from sage_grpo.runs.clips import beside, checked, read_clips, read_listing
from sage_grpo.runs.media import read_mp4, write_mp4
from sage_grpo.tools.paired import aligned, clip_rows, compared, tables
from sage_grpo.tools.templating import render
from sage_grpo.train.build import open_model
from sage_grpo.train.inputs import build_composite, reward_names, validation_requests
from sage_grpo.train.validation import Validation
from sage_grpo.worlds.registry import check_prompts, world_of

DAY = 24 * 3600.0  # seconds
# flags that determine a clip's content and scores: two evaluations may share a folder only if these match
SETTINGS = (
    "pretrained_model_root",
    "pretrained_transformer_version",
    "negative_prompt",
    "guidance_scale",
    "fps",
)
SETTINGS += ("dtype", "validate_video_length", "validation_timestep_shift", "validation_fixed_size")
SETTINGS += ("validation_num_inference_steps", "reward_path", "reward_fps")


class Evaluation:
    """State shared by all systems."""

    def __init__(self, options: argparse.Namespace, config: Config, ranks: Ranks) -> None:
        self.options, self.ranks, self.world = (
            options,
            ranks,
            world_of(config.pretrained_model_root),
        )
        self.backbone, self.config = open_model(config, ranks.device)
        prompts, usual = validation_requests(self.config), config.validation_global_seed
        own = [dataclasses.replace(p, seed=usual if p.seed is None else p.seed) for p in prompts]
        self.prompts = [
            dataclasses.replace(p, seed=seed) for seed in options.seeds or () for p in prompts
        ] or own
        self.reward = build_composite(self.config, reward_names(config), None, ranks.device)

    def systems(self) -> dict[str, Path | None]:
        """Name -> checkpoint or folder of clips, None for the base model; all others are compared with the first."""
        o, found = (
            self.options,
            {} if self.options.clips and not self.options.checkpoints else {"base": None},
        )
        for path in (*o.checkpoints, *o.clips):
            parts = path.resolve().parts[
                1:
            ]  # without the root, which would escape the output folder
            name = "-".join(
                part for part in parts[-3:] if part not in ("checkpoints", "validation")
            )
            if found.setdefault(name, path) != path:
                raise ConfigError(
                    f"{path} and {found[name]} would both be called {name}; rename one of their folders"
                )
        return found

    def settle(self, systems: Mapping[str, Path | None]) -> None:
        """Reject an output folder whose clips were made with other settings."""
        now = {name: getattr(self.config, name) for name in SETTINGS}
        now |= {f"weights of {name}": fingerprint(path) for name, path in systems.items() if path}
        home, file = self.options.output, self.options.output / "settings.json"
        before = read_object(file) if file.is_file() else {}
        for name, value in now.items():
            if before.get(name, value) != value:
                raise ConfigError(
                    f"output {home} holds clips with {name} {before[name]}, not {value}; give another"
                )
        self.ranks.barrier()
        if self.ranks.first:
            home.mkdir(parents=True, exist_ok=True)
            write_json(file, before | now)

    def run(self) -> int:
        systems = self.systems()
        self.settle(systems)
        for name, path in systems.items():
            home = self.options.output / name
            home.mkdir(parents=True, exist_ok=True)
            self.score_files(path, home) if path in self.options.clips else self.generate(
                path, home
            )
        self.ranks.barrier()
        return self.conclude(systems) if self.ranks.first else 0

    def done(self, file: Path) -> bool:
        """Whether a clip has all scores."""
        return None not in map(scores_in(file).get, self.reward.names)

    def generate(self, checkpoint: Path | None, home: Path) -> None:
        """Generate this process's share of a model's clips, except those that exist."""
        mine = self.prompts[self.ranks.rank :: self.ranks.count]
        left = [prompt for prompt in mine if not self.done(home / f"{stem(prompt)}.json")]
        if not left:
            return
        validation, size = self.validation(checkpoint), self.config.reward_batch_size
        for i in tqdm(
            range(0, len(left), size), home.name, unit="batch", disable=not self.ranks.first
        ):
            batch = left[i : i + size]
            clips = [validation.sample(prompt) for prompt in batch]
            for prompt, clip, record in zip(
                batch, clips, validation.judge(clips, batch), strict=True
            ):
                if clip is not None:
                    write_mp4(home / record["file"], clip, self.config.fps)
                keep(home / f"{stem(prompt)}.json", record)

    def validation(self, checkpoint: Path | None) -> Validation:
        """A validation that samples and scores the prompts with the base model or a checkpoint."""
        negative = Request(self.config.negative_prompt)
        self.backbone.check_requests(self.prompts)
        check_prompts(self.config.pretrained_model_root, [prompt.text for prompt in self.prompts])
        self.reward.check(self.prompts)
        self.backbone.prepare([negative, *self.prompts])
        self.backbone.load_weights(checkpoint)
        guidance = Guidance(self.config.guidance_scale, self.backbone.encode([negative])[0])
        gold = self.world and self.world.gold
        return Validation(
            backbone=self.backbone,
            config=self.config,
            requests=self.prompts,
            guidance=guidance,
            reward=self.reward,
            holdout=None,
            gold=gold,
            ranks=self.ranks,
        )

    def score_files(self, folder: Path, home: Path) -> None:
        entries = read_folder(folder)[self.ranks.rank :: self.ranks.count]
        for entry in tqdm(entries, home.name, unit="clip", disable=not self.ranks.first):
            file = home / f"{Path(entry['file']).stem}.json"
            if not self.done(file):
                clip, fps = read_mp4(entry["file"])
                scores = self.reward.score([clip], [entry["prompt"]], fps)
                named = {name: values[0].item() for name, values in scores.named.items()}
                keep(
                    file,
                    entry
                    | {"scores": named}
                    | ({"error": scores.errors[0]} if scores.errors else {}),
                )

    def conclude(self, systems: Mapping[str, Path | None]) -> int:
        """Write tables and pages for all systems; returns 1 if a score is missing."""
        lost = []
        for name, path in systems.items():
            listed = (
                [Path(e["file"]).stem for e in read_folder(path)]
                if path in self.options.clips
                else None
            )
            files = [
                self.options.output / name / f"{clip}.json"
                for clip in listed or map(stem, self.prompts)
            ]
            records = [read_object(file) for file in files]
            lost += [
                record for file, record in zip(files, records, strict=True) if not self.done(file)
            ]
            write_json(self.options.output / name / "clips.json", records)
        print(pages(self.options.output, list(systems)))
        for record in lost[:3]:
            print(
                f"{record['file']} has no score: {record.get('error', 'it could not be made')}",
                file=sys.stderr,
            )
        return 1 if lost else 0


def pages(output: Path, systems: Sequence[str]) -> str:
    """Write evaluation.json, .md and .html of the clips in `output`/SYSTEM; returns the tables for the terminal."""
    clips = {name: read_clips(output / name, anywhere=True) for name in systems}
    result = compared(clips)
    found = tables(result)
    write_json(output / "evaluation.json", result)
    values = {
        "title": "Evaluation",
        "tables": found,
        "rows": clip_rows(clips),
        "systems": len(clips),
    }
    for name in ("evaluation.md", "evaluation.html"):
        (output / name).write_text(render(name, **values), encoding="utf-8", errors="replace")
    return "\n\n".join(map(aligned, found)) + f"\n\n{output / 'evaluation.html'}"


def read_folder(folder: Path) -> list[dict[str, Any]]:
    """File, prompt and seed of each clip in a folder written by generate.py or a validation, or laid out like one."""
    listed = folder / "clips.json"
    if listed.is_file():
        entries = read_listing(listed)
    else:
        told = [
            path
            for file in sorted(folder.glob("*.mp4"))
            if (path := file.with_suffix(".json")).is_file()
        ]
        entries = [
            checked(read_object(path) | {"file": f"{path.stem}.mp4"}, str(path)) for path in told
        ]
    clips = [(beside(listed, entry["file"]).resolve(), entry) for entry in entries]
    kept = [
        {"file": str(file), "prompt": e["prompt"], "seed": e["seed"]}
        for file, e in clips
        if file.is_file()
    ]
    if not kept:
        raise ConfigError(
            f"clips {folder} holds no mp4 file that its clips.json lists, or that has a JSON beside it"
        )
    return kept


def fingerprint(path: Path) -> list[float]:
    """Total size and latest modification time under a path, to detect new weights under an old name."""
    files = [file for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    if not files:
        raise FileNotFoundError(f"{path} does not exist or is empty")
    return [sum(file.stat().st_size for file in files), max(file.stat().st_mtime for file in files)]


def stem(prompt: Request) -> str:
    """File name stem of a clip."""
    return f"{prompt.name}-{prompt.seed}"


def scores_in(file: Path) -> dict[str, float | None]:
    """The scores that a clip already has."""
    scores = read_object(file).get("scores") if file.is_file() else None
    return scores if isinstance(scores, dict) else {}


def keep(file: Path, record: Mapping[str, Any]) -> None:
    """Write a clip's record immediately; existing scores of other rewards are kept."""
    write_json(file, {**record, "scores": scores_in(file) | record["scores"]})


@answering("evaluate: ")
def main(arguments: Sequence[str] | None = None) -> int:
    disable_progress_bar()
    options, config = parse_arguments(arguments)
    model = (config.pretrained_model_root, config.pretrained_transformer_version)
    device = (
        device_for(config.device, *model)
        if options.checkpoints or not options.clips
        else config.device
    )
    with join_ranks(config.start_timeout, device_type=device) as ranks:
        ranks.set_timeout(DAY)  # ranks work independently until the end, on shares that may differ
        return Evaluation(options, config, ranks).run()


if __name__ == "__main__":
    sys.exit(main())
