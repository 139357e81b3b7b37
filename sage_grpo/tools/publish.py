"""Publish a checkpoint on the Hugging Face hub: card, weights, sample clips, and nothing else.

    python -m sage_grpo.tools.publish CHECKPOINT --repo USER/NAME [--public] [--dry_run]

Weights go in diffusers' layout, and an adapter also in ComfyUI's. The repository is created if need be, private unless
--public is given, and changes in one commit. After an interruption run the command again: what the hub already has is
not sent again. Log in with `hf auth login`, or set HF_TOKEN. --dry_run lists what would be sent, and needs no network.
"""

import argparse
import json
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sage_grpo.config.command_line import answer_early, answering
from sage_grpo.tools.options import ToolParser


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ToolParser("python -m sage_grpo.tools.publish", __doc__)
    add = parser.add_argument
    add(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="checkpoint, RUN/checkpoints/step-N; a run stands for its newest",
    )
    add("--repo", required=True, metavar="USER/NAME", help="repository on the hub")
    add("--public", action="store_true", help="make the repository public")
    add("--dry_run", action="store_true", help="list what would be sent, and stop")
    return parser.parse_args(arguments)


answer_early(__name__, parse_arguments)

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from sage_grpo.escape import markdown, without_folders
from sage_grpo.files import foreign, manifest
from sage_grpo.files.json_files import printable
from sage_grpo.models import comfyui
from sage_grpo.models.lora import LORA_FILES, read_adapter, saved_adapters
from sage_grpo.runs.clips import Clip, pair_clips, read_clips
from sage_grpo.runs.gallery import step_folders
from sage_grpo.runs.history import RunError, read_run
from sage_grpo.runs.preferences import read_preferences
from sage_grpo.train.checkpoint import read_state
from sage_grpo.train.checkpoint_folders import weights_of
from sage_grpo.train.export import is_one_of_two

CARD = "README.md"
CURVE = "curves.png"
MAX_CLIPS = 4
NO_PROMPTS = ("those of the model folder, or of sage-grpo",)
MAX_CLIP_BYTES = 20_000_000
HEADER_BYTES = 100_000_000  # most that a safetensors file has

# An absolute path of at least two parts that is no part of an address or of a relative path; a colon may be escaped.
ABSOLUTE_PATH = re.compile(
    r"(?<![\w./)}~])(?<!\w-)(?:/[\w.@+-]+){2,}|\bfile\\?:/+\w|~/\w|\b[A-Z]:\\\w"
)

Files = dict[str, Path]  # name in the repository -> file on this machine


@answering("")
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    validate_repo_id(options.repo)
    if options.repo.count("/") != 1:
        raise ValueError(f"--repo is {options.repo!r}; it must be USER/NAME")

    checkpoint = weights_of(options.checkpoint)
    with tempfile.TemporaryDirectory(prefix="sage_grpo_publish_") as scratch:
        files = collect(checkpoint, Path(scratch), options.repo.partition("/")[2])
        check_private(files, private_words(checkpoint))
        for name, path in files.items():
            print(f"{path.stat().st_size:>14,} bytes  {name}")
        if options.dry_run:
            visibility = "public" if options.public else "private"
            print(f"nothing was sent; the repository would be {options.repo}, {visibility}")
            return 0
        print(upload(options.repo, files, options.public))
    return 0


# what is sent


def collect(checkpoint: Path, scratch: Path, name: str) -> Files:
    """The files to send. What is made for the hub is written to `scratch`; `name` is that of the repository."""
    manifest.check(checkpoint)
    files = weights(checkpoint, scratch, name)
    if not (checkpoint / CARD).is_file():
        raise ValueError(
            f"{checkpoint} has no {CARD}: its model card could not be written; publish a later checkpoint"
        )
    if (checkpoint / CURVE).is_file():
        files[CURVE] = checkpoint / CURVE

    card = (checkpoint / CARD).read_text(encoding="utf-8")
    comfyui_files = [f"`{file}`" for file in files if file.endswith("_comfyui.safetensors")]
    sections = samples(checkpoint, files) + preferences(checkpoint, card) + data(checkpoint)
    card = card.replace("## Recipe\n", f"{sections}## Recipe\n", 1)
    if comfyui_files:
        verb = "are" if len(comfyui_files) > 1 else "is"
        card = re.sub(
            r"`python scripts/export_checkpoint\.py [^`]*` writes `[^`]*`(?: and `[^`]*`)?\.",
            f"{' and '.join(comfyui_files)} of this repository {verb} for ComfyUI.",
            card,
        )
    (scratch / CARD).write_text(card, encoding="utf-8")
    files[CARD] = scratch / CARD
    return dict(sorted(files.items()))


def weights(checkpoint: Path, scratch: Path, name: str) -> Files:
    """An adapter in both layouts, or the transformer as diffusers reads it."""
    files: Files = {}
    adapters = saved_adapters(checkpoint)
    has_two = bool(adapters) and is_one_of_two(checkpoint, adapters)
    for expert, adapter in adapters.items():
        files[adapter.name] = adapter
        tensors, _ = read_adapter(adapter)
        layers = [layer.rpartition(".lora_")[0] for layer in tensors]
        if comfyui.has_layout([f"{layer}.weight" for layer in layers]):
            stem = comfyui.file_name(name, expert, has_two).removesuffix(".safetensors")
            file = f"{stem}_comfyui.safetensors"
            comfyui.write_lora(adapter, scratch / file)
            files[file] = scratch / file
    if files:
        return files

    folders = [checkpoint / expert for expert in LORA_FILES if (checkpoint / expert).is_dir()]
    if not folders:
        raise ValueError(
            f"{checkpoint} has no transformer/, only the shards of the ranks; "
            "publish the last checkpoint of the run, or one that --export_interval selects"
        )
    return {
        f"{folder.name}/{path.name}": path
        for folder in folders
        for path in sorted(folder.iterdir())
    }


def samples(checkpoint: Path, files: Files) -> str:
    """The card's section with clips of held-out prompts, before and after; adds their files. Empty without any."""
    run = checkpoint.resolve().parent.parent
    step = re.fullmatch(r"step-(\d{1,16})", checkpoint.resolve().name)
    try:
        comparable = {line["step"] for line in read_run(run).validations}
    except (RunError, OSError):  # a checkpoint without its run has no clips
        comparable = set()
    folders = step_folders(run / "validation")
    known = [
        number for number in folders if number in comparable and step and number <= int(step[1])
    ]
    if not known:
        return ""
    after = _clips(folders[max(known)])
    before = _clips(folders[min(known)]) if len(known) > 1 else []

    pairs = [[old, new] for old, new in pair_clips(before, after)] or [[clip] for clip in after]
    if not pairs:
        return ""
    titles = [f"iteration {max(known)}"]
    if before:
        titles.insert(0, f"iteration {min(known)}")

    lines = ["## Samples", "", f"Held-out prompts; {' and '.join(titles)}.", ""]
    lines += [f"| prompt | {' | '.join(titles)} |", f"|---|{'---|' * len(titles)}"]
    for number, pair in enumerate(pairs[:MAX_CLIPS], 1):
        cells = []
        for title, clip in zip(titles, pair, strict=True):
            file = f"samples/{number:02d}_{title.replace(' ', '_')}.mp4"
            files[file] = clip.path
            cells.append(f'<video src="{file}" controls muted loop></video>')
        lines.append(f"| {markdown(pair[0].prompt)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", ""])


def preferences(checkpoint: Path, card: str) -> str:
    """The card's section about what people preferred, unless the card has it: a study may follow the checkpoint."""
    rows = read_preferences(checkpoint.resolve().parent.parent)
    if not rows or "blind comparison by people" in card:
        return ""
    lines = [
        "## Preferences",
        "",
        "| blind comparison by people | question | win rate, ties count half |",
    ]
    lines.append("|---|---|---|")
    for row in rows:
        systems = f"{markdown(row.system)} against {markdown(row.other)}"
        lines.append(f"| {systems} | {markdown(row.question)} | {row} |")
    return "\n".join([*lines, "", ""])


def data(checkpoint: Path) -> str:
    """The card's section about the prompts, which are the only data of training."""
    state = read_state(checkpoint)
    config = state["config"]
    count = str(state["fingerprints"].get("training prompts", "")).partition(",")[0]
    lines = ["## Data", "", f"Training used {markdown(count)} prompts and no videos."]
    for kind, key in (("trained on", "train_prompts"), ("validated with", "validation_prompts")):
        names = without_folders(config.get(key) or NO_PROMPTS, is_path=True)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{checkpoint} has {key} {names!r:.100}; a list of files is expected")
        lines.append(f"- {kind}: {', '.join(markdown(name) for name in names)}")
    return "\n".join([*lines, "", ""])


def _clips(folder: Path) -> list[Clip]:
    """The clips of a validation whose files are here and small; none if its listing is damaged."""
    try:
        clips = read_clips(folder)
    except RunError:
        return []
    return [clip for clip in clips if _is_small(clip.path)]


def _is_small(path: Path) -> bool:
    try:
        with foreign.open_regular(path, MAX_CLIP_BYTES):
            return True
    except (OSError, foreign.Refused):
        return False


# nothing about the machine


def private_words(checkpoint: Path) -> dict[str, str]:
    """Words that must not be sent -> what each is. Other paths, which may name users, are found by their form."""
    words = {
        str(Path.home()): "the home folder",
        str(checkpoint.resolve().parent): "the folder of the checkpoints",
    }
    host = socket.gethostname()
    if re.search(r"[\d.-]", host):  # a name such as `demo` may occur in any text
        words[host] = "the name of this machine"
    return {word: what for word, what in words.items() if word != "/"}


def check_private(files: Mapping[str, Path], words: Mapping[str, str]) -> None:
    """Reject files with a path or the name of the machine in their text or in the header of their tensors."""
    for name, path in files.items():
        for text in texts(path):
            for word, what in words.items():
                if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text):
                    raise ValueError(f"{name} names {what}, {word!r}; nothing was sent")
            match = ABSOLUTE_PATH.search(text)
            if match:
                raise ValueError(f"{name} names the path {match[0]!r}; nothing was sent")


def texts(path: Path) -> Iterator[str]:
    """All text in a file: that of Markdown and JSON, the metadata of safetensors."""
    if path.suffix in (".md", ".json"):
        yield path.read_text(encoding="utf-8")
    elif path.suffix == ".safetensors":
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > HEADER_BYTES:
                raise ValueError(f"{path} is not a safetensors file")
            header = json.loads(file.read(size))
        yield json.dumps(header.get("__metadata__", {}))
    elif path.suffix not in (".png", ".mp4"):
        raise ValueError(f"{path.name} is of a kind that is not published")


# the hub


def upload(repo: str, files: Files, public: bool) -> str:
    """Create the repository if need be and send the files in one commit; returns the address."""
    if get_token() is None:
        raise ValueError("you are not logged in to the hub; run `hf auth login`, or set HF_TOKEN")
    api = HfApi()
    try:
        check_visibility(api, repo, public)
        api.create_repo(repo, private=not public, exist_ok=True)
        operations = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
        commit = api.create_commit(
            repo, operations, commit_message="Checkpoint, published with sage-grpo"
        )
    except (HfHubHTTPError, OSError, RuntimeError) as error:
        raise ValueError(
            f"the hub refused {repo} ({printable(error):.300}); run the command again to continue"
        ) from error
    return str(commit.repo_url)


def check_visibility(api: HfApi, repo: str, public: bool) -> None:
    """Nobody's weights become public by accident."""
    try:
        is_private = api.repo_info(repo).private
    except RepositoryNotFoundError:
        return
    if not is_private and not public:
        raise ValueError(f"{repo} is public; add --public if everybody may see these weights")


if __name__ == "__main__":
    sys.exit(main())
