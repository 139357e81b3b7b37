"""Compares checkpoints with the base model or each other, or folders of clips: same prompts, seeds and rewards.

    python -m sage_grpo.tools.evaluate --config RUN/config.yaml --checkpoints RUN/checkpoints/step-000100 \\
        --reward_model videoalign clipscore pickscore
    python -m sage_grpo.tools.evaluate --config RUN/config.yaml --reference OTHER_RUN --checkpoints RUN
    python -m sage_grpo.tools.evaluate --clips OURS THEIRS --reward_model videoalign

Takes every flag of post_train.py; the validation flags control how clips are made, and reward_weights are ignored. Each
clip is saved with its scores right away, so a second call continues where the first one stopped. Under torchrun every
process has a full model and its share of the prompts. Exit code 0: done; 1: a score is missing; 2: the configuration
or a file is wrong.
"""

import argparse
import dataclasses
import re
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
        help="weights to compare; a run stands for its newest checkpoint",
    )
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="FOLDER",
        help="weights that the others are compared with (default: the base model)",
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
from sage_grpo.files.paths import check_folder, make_folder
from sage_grpo.models.backbone import Guidance, check_weights
from sage_grpo.models.registry import device_for
from sage_grpo.parallel.ranks import Ranks, join_ranks
from sage_grpo.runs.clips import beside, checked, read_clips, read_listing
from sage_grpo.runs.media import read_mp4, reduced, write_mp4
from sage_grpo.tools.paired import aligned, clip_rows, compared, tables
from sage_grpo.tools.templating import render
from sage_grpo.train.build import open_model
from sage_grpo.train.checkpoint_folders import weights_of
from sage_grpo.train.inputs import build_composite, reward_names, validation_requests
from sage_grpo.train.validation import Validation
from sage_grpo.worlds.registry import check_prompts, world_of

BASE = "base"  # name of the base model
DAY = 24 * 3600.0  # seconds
# flags that determine a clip's content and scores: two evaluations may share a folder only if these match
SETTINGS = (
    "pretrained_model_root",
    "pretrained_transformer_version",
    "negative_prompt",
    "guidance_scale",
    "guidance_scale_2",
    "fps",
    "dtype",
    "validate_video_length",
    "validation_timestep_shift",
    "validation_fixed_size",
    "validation_num_inference_steps",
    "validation_solver",
    "reward_path",
    "reward_fps",
)

# name -> checkpoint or folder of clips, None for the base model
Systems = Mapping[str, Path | None]


class Evaluation:
    """State shared by all systems."""

    def __init__(self, options: argparse.Namespace, config: Config, ranks: Ranks) -> None:
        self.options = options
        self.output: Path = options.output
        self.ranks = ranks
        self.world = world_of(config.pretrained_model_root)
        self.backbone, self.config = open_model(config, ranks.device)
        self.backbone.check_second_guidance(config.guidance_scale_2)
        self.requests = seeded(
            validation_requests(self.config), options.seeds, config.validation_global_seed
        )
        self.reward = build_composite(self.config, reward_names(config), None, ranks.device)

    def run(self) -> int:
        """Make and score all clips that are missing; returns the exit code."""
        options = self.options
        systems = system_names(options.checkpoints, options.clips, options.reference)
        self.check_settings(systems)
        for name, path in systems.items():
            folder = self.output / name
            make_folder(folder, "output")
            if path in self.options.clips:
                self.score_files(path, folder)
            else:
                self.generate(path, folder)
        self.ranks.barrier()
        return self.conclude(systems) if self.ranks.is_first else 0

    def check_settings(self, systems: Systems) -> None:
        """Reject an output folder whose clips were made with other settings."""
        settings: dict[str, Any] = {name: getattr(self.config, name) for name in SETTINGS}
        for name, value in self.reward.fingerprint().items():
            settings[f"reward {name}"] = value
        for score, name in self.reward.owners.items():
            settings[f"the score {score} of the reward"] = name
        if any(path not in self.options.clips for path in systems.values()):
            settings.update(self.backbone.fingerprints())
        for name, path in systems.items():
            if path:
                settings[f"weights of {name}"] = fingerprint(path)

        file = self.output / "settings.json"
        earlier = read_object(file) if file.is_file() else {}
        for name, value in settings.items():
            if earlier.get(name, value) != value:
                raise ConfigError(
                    f"output {self.output} holds clips with {name} {earlier[name]}, not {value};"
                    " give another folder"
                )
        self.ranks.barrier()
        if self.ranks.is_first:
            make_folder(self.output, "output")
            write_json(file, earlier | settings)

    def has_all_scores(self, file: Path) -> bool:
        """Whether a clip's record has the scores of all rewards."""
        scores = read_scores(file)
        return all(scores.get(name) is not None for name in self.reward.names)

    # clips of a model

    def generate(self, checkpoint: Path | None, folder: Path) -> None:
        """Generate this process's share of a model's clips, except those that exist."""
        share = self.requests[self.ranks.dp_rank :: self.ranks.dp_size]
        missing = [
            request
            for request in share
            if not self.has_all_scores(folder / f"{stem(request)}.json")
        ]
        if not missing:
            return
        validation = self.open_validation(checkpoint)
        size = self.config.reward_batch_size
        batches = [missing[i : i + size] for i in range(0, len(missing), size)]
        for batch in tqdm(batches, folder.name, unit="batch", disable=not self.ranks.is_first):
            clips = [validation.sample(request) for request in batch]
            records = validation.score_clips(clips, batch)
            for request, clip, record in zip(batch, clips, records, strict=True):
                if clip is not None:
                    write_mp4(folder / record["file"], clip, self.config.fps)
                save_record(folder / f"{stem(request)}.json", record)

    def open_validation(self, checkpoint: Path | None) -> Validation:
        """A validation that samples and scores the prompts with the base model or a checkpoint."""
        c = self.config
        self.backbone.check_requests(self.requests)
        check_prompts(c.pretrained_model_root, [request.text for request in self.requests])
        self.reward.check(self.requests)

        negative = Request(c.negative_prompt)
        self.backbone.prepare([negative, *self.requests])
        self.backbone.load_weights(checkpoint)
        return Validation(
            backbone=self.backbone,
            config=c,
            requests=self.requests,
            guidance=Guidance(
                c.guidance_scale,
                self.backbone.encode([negative])[0],
                scale_2=c.guidance_scale_2,
            ),
            reward=self.reward,
            holdout_reward=None,
            gold=self.world.gold if self.world else None,
            ranks=self.ranks,
        )

    # clips of a folder

    def score_files(self, clip_folder: Path, folder: Path) -> None:
        """Score this process's share of the clips in a folder, except those that have all scores."""
        share = read_folder(clip_folder)[self.ranks.dp_rank :: self.ranks.dp_size]
        for entry in tqdm(share, folder.name, unit="clip", disable=not self.ranks.is_first):
            file = folder / f"{Path(entry['file']).stem}.json"
            if self.has_all_scores(file):
                continue
            video, fps = read_mp4(entry["file"])
            clip = reduced(video, entry.get("height", 0), entry.get("width", 0))
            scores = self.reward.score([clip], [entry["prompt"]], fps)
            record = dict(entry)
            record["scores"] = {name: values[0].item() for name, values in scores.named.items()}
            if scores.errors:
                record["error"] = scores.errors[0]
            save_record(file, record)

    # results

    def conclude(self, systems: Systems) -> int:
        """Write tables and pages for all systems; returns 1 if a score is missing."""
        incomplete = []
        for name, path in systems.items():
            if path in self.options.clips:
                stems = [Path(entry["file"]).stem for entry in read_folder(path)]
            else:
                stems = [stem(request) for request in self.requests]
            files = [self.output / name / f"{clip_stem}.json" for clip_stem in stems]
            records = [read_object(file) for file in files]
            for file, record in zip(files, records, strict=True):
                if not self.has_all_scores(file):
                    incomplete.append(record)
            write_json(self.output / name / "clips.json", records)

        print(write_pages(self.output, list(systems)))
        for record in incomplete[:3]:
            reason = record.get("error", "it could not be made")
            print(f"{record['file']} has no score: {reason}", file=sys.stderr)
        return 1 if incomplete else 0


def seeded(
    requests: Sequence[Request], seeds: Sequence[int] | None, default_seed: int
) -> list[Request]:
    """Each request with each of the seeds; without any, with its own seed or the default one."""
    if seeds:
        return [dataclasses.replace(request, seed=seed) for seed in seeds for request in requests]
    return [
        dataclasses.replace(request, seed=default_seed) if request.seed is None else request
        for request in requests
    ]


def system_names(
    checkpoints: Sequence[Path], clips: Sequence[Path], reference: Path | None = None
) -> dict[str, Path | None]:
    """The systems by name; all others are compared with the first: the reference, or without it the base model.

    If there are only clips, it is the first folder of these.

    A name has as few of the last parts of a path as make it differ from all others: names are published, and the first
    parts name users and projects.
    """
    first = () if reference is None else (reference,)
    paths = list(dict.fromkeys((*first, *checkpoints, *clips)))
    has_base = reference is None and (bool(checkpoints) or not clips)
    systems: dict[str, Path | None] = {BASE: None} if has_base else {}
    names = short_names(paths) if paths else []
    return systems | dict(zip(names, paths, strict=True))


def short_names(paths: Sequence[Path]) -> list[str]:
    parts = [name_parts(path) for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["-".join(each[-depth:]) for each in parts]
        if len({"", BASE, *names}) == len(names) + 2:
            return names
    raise ConfigError(
        f"the names of {', '.join(map(str, paths))} do not differ from each other and from {BASE}; rename a folder"
    )


def name_parts(path: Path) -> list[str]:
    """The parts of a path that can name what is there; a step alone cannot, as every run has it."""
    # without the root, which would escape the output folder
    parts = [part for part in path.resolve().parts[1:] if part not in ("checkpoints", "validation")]
    if len(parts) > 1 and re.fullmatch(r"step-\d+", parts[-1]):
        parts[-2:] = [f"{parts[-2]}-{parts[-1]}"]
    return parts


def write_pages(output: Path, systems: Sequence[str]) -> str:
    """Write evaluation.json, .md and .html of the clips in `output`/SYSTEM; returns the tables for the terminal."""
    clips = {name: read_clips(output / name, anywhere=True) for name in systems}
    result = compared(clips)
    result_tables = tables(result)
    write_json(output / "evaluation.json", result)

    markdown = "\n".join(markdown_table(table.rows) for table in result_tables)
    html = render(
        "evaluation.html",
        title="Evaluation",
        tables=result_tables,
        rows=clip_rows(clips),
        systems=len(clips),
    )
    for name, text in (("evaluation.md", markdown), ("evaluation.html", html)):
        (output / name).write_text(text, encoding="utf-8", errors="replace")
    shown = [aligned(table.rows) for table in result_tables]
    return "\n\n".join([*shown, str(output / "evaluation.html")])


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    titles, *others = rows
    rule = ["---", *["---:"] * (len(titles) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (titles, rule, *others))


# records of clips


def read_folder(folder: Path) -> list[dict[str, Any]]:
    """File, prompt and seed of each clip in a folder written by generate.py or a validation, or laid out like one.

    And height and width, in pixels as sampled, where its record has them.
    """
    listing = folder / "clips.json"
    if listing.is_file():
        records = read_listing(listing)
    else:
        records = []
        for video in sorted(folder.glob("*.mp4")):
            file = video.with_suffix(".json")
            if file.is_file():
                records.append(checked(read_object(file) | {"file": video.name}, str(file)))

    entries = []
    for record in records:
        video = beside(listing, record["file"]).resolve()
        if not video.is_file():
            continue
        entry = {"file": str(video), "prompt": record["prompt"], "seed": record["seed"]}
        size = {name: record.get(name) for name in ("height", "width")}
        if all(isinstance(pixels, int) for pixels in size.values()):
            entry.update(size)
        entries.append(entry)
    if not entries:
        raise ConfigError(
            f"clips {folder} holds no mp4 file that its clips.json lists, or that has a JSON beside it"
        )
    return entries


def fingerprint(path: Path) -> list[float]:
    """Total size and latest modification time under a path, to detect new weights under an old name."""
    candidates = path.rglob("*") if path.is_dir() else [path]
    stats = [file.stat() for file in candidates if file.is_file()]
    if not stats:
        raise FileNotFoundError(f"{path} does not exist or is empty")
    return [sum(stat.st_size for stat in stats), max(stat.st_mtime for stat in stats)]


def stem(request: Request) -> str:
    """File name of a clip, without its suffix."""
    return f"{request.name}-{request.seed}"


def read_scores(file: Path) -> dict[str, float | None]:
    """The scores that a clip already has."""
    scores = read_object(file).get("scores") if file.is_file() else None
    return scores if isinstance(scores, dict) else {}


def save_record(file: Path, record: Mapping[str, Any]) -> None:
    """Write a clip's record immediately; existing scores of other rewards are kept."""
    write_json(file, {**record, "scores": read_scores(file) | record["scores"]})


def found_weights(path: Path) -> Path:
    """The weights that a path stands for; an error if there are none."""
    found = weights_of(path)
    check_weights(found)
    return found


@answering("evaluate: ")
def main(arguments: Sequence[str] | None = None) -> int:
    disable_progress_bar()
    options, config = parse_arguments(arguments)
    check_folder(options.output, "output")
    # before anything is sampled
    options.checkpoints = [found_weights(path) for path in options.checkpoints]
    if options.reference:
        options.reference = found_weights(options.reference)
    device = config.device
    if options.checkpoints or options.reference or not options.clips:  # then a model is run
        device = device_for(
            device, config.pretrained_model_root, config.pretrained_transformer_version
        )
    with join_ranks(config.start_timeout, device_type=device) as ranks:
        ranks.set_timeout(DAY)  # ranks work independently until the end, on shares that may differ
        return Evaluation(options, config, ranks).run()


if __name__ == "__main__":
    sys.exit(main())
