"""Requests for clips, and the files that list them.

Prompt files are .txt (one prompt per line), .csv (`prompt`, optional `index`, `seed` and `image`) or .jsonl (the same
keys). An image is a path relative to the file.
"""

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from sage_grpo.data.images import Image, read_image

COLUMNS = ("prompt", "index", "seed", "image")
MOST = 2**63 - 1  # the index and the seed are part of file names


@dataclass(frozen=True)
class Request:
    """A request for a clip: a prompt, its index, the seed that validation and generation use for it, its first frame.

    Training never uses the seed.
    """

    text: str
    index: int = 0
    seed: int | None = None
    image: Image | None = None

    def sized(self, height: int, width: int) -> "Request":
        """The request for a clip of this size, to which its image is cropped."""
        return (
            replace(self, image=replace(self.image, size=(height, width))) if self.image else self
        )

    @property
    def content(self) -> "Request":
        """The request without index and seed: everything that a model encodes."""
        return Request(self.text, image=self.image)

    def __str__(self) -> str:
        """What a model encodes, in one string: no text holds a NUL."""
        return f"{self.text}\0{self.image}" if self.image else self.text

    @property
    def key(self) -> str:
        """Content hash: requests with equal keys have equal conditionings."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:32]

    @property
    def name(self) -> str:
        """A file name made of the index and a short hash, so that no prompt can escape the folder."""
        return f"{self.index:04d}-{self.key[:8]}"


def read_requests(path: str | Path) -> list[Request]:
    """All prompts of a file, in order. An empty or unreadable file is rejected, naming the bad line."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"prompt file {path} does not exist")
    readers = {".txt": _lines, ".csv": _csv, ".jsonl": _jsonl}
    if path.suffix not in readers:
        raise ValueError(f"prompt file {path} must end in {', '.join(readers)}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {path} is not UTF-8 text: {error}") from error
    rows = enumerate(readers[path.suffix](text, path))
    prompts = [_request(row, number, where, path.parent) for number, (where, row) in rows]
    if not prompts:
        raise ValueError(f"prompt file {path} holds no prompt")
    seen: dict[int, str] = {}
    for prompt in prompts:  # the index determines file names and noise
        if prompt.index in seen:
            raise ValueError(
                f"{path}: index {prompt.index} is that of {seen[prompt.index]!r} and of {prompt.text!r}"
            )
        seen[prompt.index] = prompt.text
    return prompts


def _request(row: dict, number: int, where: str, folder: Path) -> Request:
    if unknown := sorted(str(key) for key in row if key not in COLUMNS):
        raise ValueError(f"{where}: unknown column {unknown[0]!r}; known are {', '.join(COLUMNS)}")
    text = row.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: the prompt is missing or empty")
    check_text(text, where)
    index, seed = (_integer(row.get(key), key, where) for key in ("index", "seed"))
    if (image := row.get("image") or None) and not isinstance(image, str):
        raise ValueError(
            f"{where}: image is a {type(image).__name__}; it must be the path of a file"
        )
    image = image and read_image(folder / image, where)
    return Request(text, number if index is None else index, seed, image)


def check_text(text: str, where: str) -> None:
    """Reject text that files or tokenizers cannot handle."""
    if "\0" in text:
        raise ValueError(f"{where}: the prompt holds a NUL character")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(
            f"{where}: the prompt {text!r} holds half a character; write it as UTF-8 text"
        )


def _integer(value: object, key: str, where: str) -> int | None:
    if value is None or value == "":
        return None
    text = str(value) if isinstance(value, (str, int)) else f"a {type(value).__name__}"
    if not re.fullmatch(r"\s*\d{1,19}\s*", text) or int(text) > MOST:
        raise ValueError(
            f"{where}: {key} is {text[:50]!r}; it must be a whole number from 0 to {MOST}"
        )
    return int(text)


def _lines(text: str, path: Path) -> Iterator[tuple[str, dict]]:
    """Lines that are not empty, each as a prompt, and where they are."""
    lines = enumerate(io.StringIO(text, newline=None), 1)
    return (
        (f"{path} line {number}", {"prompt": line.strip()})
        for number, line in lines
        if line.strip()
    )


def _csv(text: str, path: Path) -> Iterable[tuple[str, dict]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        if "prompt" not in (reader.fieldnames or ()):
            raise ValueError(f"{path}: the first line must name the columns, `prompt` among them")
        return [(f"{path} line {reader.line_num}", row) for row in reader]
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num}: not CSV ({error})") from error


def _jsonl(text: str, path: Path) -> Iterator[tuple[str, dict]]:
    for where, line in _lines(text, path):
        try:
            row = json.loads(line["prompt"])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected an object with the key `prompt`")
        yield where, row
