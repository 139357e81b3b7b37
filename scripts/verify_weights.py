"""Compare downloaded files with the size and sha256 published by their hub. download_weights.sh runs this.

    python scripts/verify_weights.py tencent/HunyuanVideo-1.5 ckpts --include "vae/*"
    python scripts/verify_weights.py AI-ModelScope/Glyph-SDXL-v2 FOLDER --hub modelscope --include "checkpoints/*"

Hubs publish hashes for large files; of small text files only the size is compared. Exit code 1: a file is missing or
differs from the published one. If a hub cannot be reached, only the files in PINNED are checked, and a message says so.
"""

import argparse
import hashlib
import json
import os
import sys
import urllib.request
from collections.abc import Mapping
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

HUGGINGFACE = os.environ.get("HF_ENDPOINT", "https://huggingface.co") + "/api/models/{}?blobs=true"
MODELSCOPE = (
    os.environ.get("MODELSCOPE_ENDPOINT", "https://modelscope.cn")
    + "/api/v1/models/{}/repo/files?Recursive=true"
)


class Published(NamedTuple):
    """What is known of a published file."""

    size: int | None = None
    sha256: str | None = None


# Files that must be these ones, whatever the hub says: another reward model gives other scores.
VIDEOREWARD = {
    "checkpoint-11352/model.pth": Published(
        5_031_072_529, "48375908e6112de9f0248402db156a23b480709a6960b091c598c6f4c88d21b9"
    )
}
PINNED = {"KlingTeam/VideoReward": VIDEOREWARD, "KwaiVGI/VideoReward": VIDEOREWARD}


def main(arguments: list[str] | None = None) -> int:
    form = partial(argparse.RawDescriptionHelpFormatter, max_help_position=32, width=110)
    parser = argparse.ArgumentParser(
        "scripts/verify_weights.py", description=__doc__, formatter_class=form
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
    args = parser.parse_args(arguments)
    pinned = PINNED.get(args.repository, {})
    try:
        published = HUBS[args.hub](args.repository) | pinned
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
    ) as error:  # no answer, or another kind of answer
        rest = f", except {', '.join(pinned)}" if pinned else ""
        print(
            f"NOT CHECKED{rest}: {args.repository} cannot be asked for its sha256 sums ({error})",
            file=sys.stderr,
        )
        published = pinned
    published = {path: known for path, known in published.items() if fnmatch(path, args.include)}
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
    hashed = sum(known.sha256 is not None for known in published.values())
    print(
        f"{args.repository} {args.include}: {len(published)} files, {hashed} with a sha256, {len(wrong)} wrong"
    )
    return 1 if wrong else 0


def is_inside(name: str) -> bool:
    """Whether a published name stays in the folder that it is downloaded to: a mirror may list anything."""
    path = Path(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def differences(folder: Path, published: Mapping[str, Published]) -> dict[Path, str]:
    """What is wrong with each file that differs from the published one."""
    wrong = {}
    for name, known in published.items():
        path = folder / name
        if not path.is_file():
            wrong[path] = "is missing; run download_weights.sh again."
        elif known.size not in (None, path.stat().st_size):
            size = path.stat().st_size
            wrong[path] = (
                f"has {size:,} bytes instead of {known.size:,}; delete it and run download_weights.sh again."
            )
        elif known.sha256 and (found := file_sha256(path)) != known.sha256:
            wrong[path] = (
                f"has sha256 {found} instead of {known.sha256}; delete it and run download_weights.sh again."
            )
    return wrong


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_huggingface(repository: str) -> dict[str, Published]:
    files = ask(HUGGINGFACE.format(repository))["siblings"]
    return {
        f["rfilename"]: Published(f.get("size"), (f.get("lfs") or {}).get("sha256")) for f in files
    }


def of_modelscope(repository: str) -> dict[str, Published]:
    files = ask(MODELSCOPE.format(repository))["Data"]["Files"]
    return {
        f["Path"]: Published(f.get("Size"), f.get("Sha256") or None)
        for f in files
        if f["Type"] != "tree"
    }


def ask(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


HUBS = {"huggingface": of_huggingface, "modelscope": of_modelscope}


if __name__ == "__main__":
    sys.exit(main())
