"""Compare downloaded files with the size and sha256 published by their hub. download_weights.sh runs this.

    python scripts/verify_weights.py tencent/HunyuanVideo-1.5 ckpts --include "vae/*"
    python scripts/verify_weights.py AI-ModelScope/Glyph-SDXL-v2 FOLDER --hub modelscope --include "checkpoints/*"

Hubs publish hashes for large files; of small text files only the size is compared. If a hub cannot be reached, only the
files in PINNED are checked, and a message says so. Exit code 1: a file is missing or differs from the published one;
2: a file cannot be read or deleted, or the hub lists no file that matches.
"""

import argparse
import hashlib
import http.client
import json
import os
import sys
import urllib.request
from collections.abc import Mapping
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

HF_ENDPOINT = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
MODELSCOPE_ENDPOINT = os.environ.get("MODELSCOPE_ENDPOINT", "https://modelscope.cn")


class Published(NamedTuple):
    """What is known about a published file."""

    size: int | None = None  # bytes
    sha256: str | None = None


# Files that must be these ones, whatever the hub says: another reward model gives other scores.
VIDEOREWARD = {
    "checkpoint-11352/model.pth": Published(
        5_031_072_529, "48375908e6112de9f0248402db156a23b480709a6960b091c598c6f4c88d21b9"
    )
}
PINNED = {"KlingTeam/VideoReward": VIDEOREWARD, "KwaiVGI/VideoReward": VIDEOREWARD}

# what is raised if a hub does not answer, breaks off, or answers in another form
UNUSABLE = (
    OSError,
    http.client.HTTPException,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        return verify(args)
    except (
        OSError
    ) as error:  # this program runs before anything is installed, so it has a boundary of its own
        print(f"verify_weights.py: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def verify(args: argparse.Namespace) -> int:
    """Compare the files in a folder with the published ones; returns the exit code."""
    listed = published_files(args.repository, args.hub)
    pinned = PINNED.get(args.repository, {})
    published = {
        path: file
        for path, file in ((listed or {}) | pinned).items()
        if fnmatch(path, args.include)
    }
    if listed is not None and not any(fnmatch(path, args.include) for path in listed):
        print(
            f"NOT CHECKED: {args.repository} lists {len(listed)} files, none of them {args.include}",
            file=sys.stderr,
        )
        return 2
    outside = [path for path in published if not is_inside(path)]
    if outside:
        print(
            f"{args.repository} lists {outside[0]!r}, which is not in {args.folder}",
            file=sys.stderr,
        )
        return 1
    wrong = differences(args.folder, published)
    for path, reason in wrong.items():
        print(f"{path} {reason}", file=sys.stderr)
        if args.remove_wrong:
            path.unlink(missing_ok=True)
    hashed = sum(file.sha256 is not None for file in published.values())
    print(
        f"{args.repository} {args.include}: "
        f"{len(published)} files, {hashed} with a sha256, {len(wrong)} wrong"
    )
    return 1 if wrong else 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    # argparse itself: this program runs before anything is installed
    parser = argparse.ArgumentParser(
        "scripts/verify_weights.py",
        description=__doc__,
        formatter_class=partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=32, width=110
        ),
    )
    add = parser.add_argument
    add("repository", metavar="OWNER/NAME", help="repository on the hub that published the files")
    add("folder", type=Path, metavar="FOLDER", help="folder that the repository was downloaded to")
    add(
        "--include",
        metavar="PATTERN",
        default="*",
        help="check only files whose path matches (default: all files)",
    )
    add(
        "--hub",
        choices=HUBS,
        default="huggingface",
        help="hub to ask for sizes and hashes (default: huggingface)",
    )
    add(
        "--remove_wrong",
        action="store_true",
        help="delete files that differ, so that they are downloaded again",
    )
    return parser.parse_args(arguments)


def published_files(repository: str, hub: str) -> dict[str, Published] | None:
    """All files of a repository; None if the hub cannot be asked."""
    try:
        return HUBS[hub](repository)
    except UNUSABLE as error:
        pinned = PINNED.get(repository)
        exception = f", except {', '.join(pinned)}" if pinned else ""
        reason = "".join(letter for letter in str(error) if letter.isprintable())  # a hub's words
        print(
            f"NOT CHECKED{exception}: {repository} cannot be asked for its sha256 sums ({reason})",
            file=sys.stderr,
        )
        return None


def is_inside(name: str) -> bool:
    """Whether a published name stays in the folder that it is downloaded to: a mirror may list anything."""
    path = Path(name)
    is_relative = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    return is_relative and name.isprintable()


def differences(folder: Path, published: Mapping[str, Published]) -> dict[Path, str]:
    """What is wrong with each file that differs from the published one."""
    wrong = {}
    for name, file in published.items():
        problem = difference(folder / name, file)
        if problem:
            wrong[folder / name] = problem
    return wrong


def difference(path: Path, published: Published) -> str | None:
    """How a file differs from the published one, and the remedy."""
    if not path.is_file():
        return "is missing; run download_weights.sh again."
    remedy = "delete it and run download_weights.sh again."
    size = path.stat().st_size
    if published.size not in (None, size):
        return f"has {size:,} bytes instead of {published.size:,}; {remedy}"
    if published.sha256:
        sha256 = file_sha256(path)
        if sha256 != published.sha256:
            return f"has sha256 {sha256} instead of {published.sha256}; {remedy}"
    return None


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_on_huggingface(repository: str) -> dict[str, Published]:
    answer = ask(f"{HF_ENDPOINT}/api/models/{repository}?blobs=true")
    published = {}
    for file in answer["siblings"]:
        lfs = file.get("lfs") or {}  # large files only
        published[str(file["rfilename"])] = described(file.get("size"), lfs.get("sha256"))
    return published


def files_on_modelscope(repository: str) -> dict[str, Published]:
    answer = ask(f"{MODELSCOPE_ENDPOINT}/api/v1/models/{repository}/repo/files?Recursive=true")
    published = {}
    for file in answer["Data"]["Files"]:
        if file["Type"] != "tree":  # a folder
            published[str(file["Path"])] = described(file.get("Size"), file.get("Sha256") or None)
    return published


def described(size: Any, sha256: Any) -> Published:
    """What a hub says about a file; TypeError if that is something else than a size and a hash."""
    if not isinstance(size, int | None) or not isinstance(sha256, str | None):
        raise TypeError(f"a file has size {size!r:.60} and sha256 {sha256!r:.60}")
    return Published(size, sha256)


def ask(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


HUBS = {"huggingface": files_on_huggingface, "modelscope": files_on_modelscope}


if __name__ == "__main__":
    sys.exit(main())
