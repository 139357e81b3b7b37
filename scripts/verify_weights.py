"""Compare downloaded files with the sha256 published by their hub. download_weights.sh runs this after each part.

    python scripts/verify_weights.py tencent/HunyuanVideo-1.5 ckpts --include "vae/*"
    python scripts/verify_weights.py AI-ModelScope/Glyph-SDXL-v2 FOLDER --hub modelscope --include "checkpoints/*"

Hubs publish hashes for large files; small text files are only checked for existence. Exit code 1: a file is missing or
differs from the published one. If a hub cannot be reached, the files stay unchecked, and a message says so.
"""

import argparse
import hashlib
import json
import os
import sys
import urllib.request
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

HUGGINGFACE = os.environ.get("HF_ENDPOINT", "https://huggingface.co") + "/api/models/{}?blobs=true"
MODELSCOPE = (
    os.environ.get("MODELSCOPE_ENDPOINT", "https://modelscope.cn") + "/api/v1/models/{}/repo/files?Recursive=true"
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--include", default="*", help="pattern of the files; default: all")
    parser.add_argument("--hub", choices=HUBS, default="huggingface")
    args = parser.parse_args(arguments)
    try:
        published = HUBS[args.hub](args.repository)
    except OSError as error:
        print(f"NOT CHECKED: {args.repository} cannot be asked for its sha256 sums ({error})", file=sys.stderr)
        return 0
    published = {path: sha256 for path, sha256 in published.items() if fnmatch(path, args.include)}
    wrong = differences(args.folder, published)
    for line in wrong:
        print(line, file=sys.stderr)
    known = sum(sha256 is not None for sha256 in published.values())
    print(f"{args.repository} {args.include}: {len(published)} files, {known} with a sha256, {len(wrong)} wrong")
    return 1 if wrong else 0


def differences(folder: Path, published: Mapping[str, str | None]) -> list[str]:
    """One sentence per file that differs from the published one; None means its hash is not known."""
    wrong = []
    for name, expected in published.items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{path} is missing; run download_weights.sh again.")
        elif expected is not None and (found := file_sha256(path)) != expected:
            wrong.append(
                f"{path} has sha256 {found} instead of {expected}; delete it and run download_weights.sh again."
            )
    return wrong


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_huggingface(repository: str) -> dict[str, str | None]:
    files = ask(HUGGINGFACE.format(repository))["siblings"]
    return {file["rfilename"]: (file.get("lfs") or {}).get("sha256") for file in files}


def of_modelscope(repository: str) -> dict[str, str | None]:
    files = ask(MODELSCOPE.format(repository))["Data"]["Files"]
    return {file["Path"]: file.get("Sha256") or None for file in files if file["Type"] != "tree"}


def ask(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


HUBS = {"huggingface": of_huggingface, "modelscope": of_modelscope}


if __name__ == "__main__":
    sys.exit(main())
