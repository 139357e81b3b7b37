"""Requests for clips, and the files that list them.

Prompt files are .txt (one prompt per line), .csv (`prompt`, optional `index`, `seed` and `image`) or .jsonl (the same
keys). An image is a path relative to the file, in the folder of the file or below.
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
MAX_INTEGER = 2**63 - 1  # the index and the seed are part of file names


@dataclass(frozen=True)
class Request:
    """A request for a clip."""

    text: str  # the prompt
    index: int = 0  # of the prompt, in its file or as the file says
    seed: int | None = None  # for validation and generation; training never uses it
    image: Image | None = None  # the first frame

    def sized(self, height: int, width: int) -> "Request":
        """The request for a clip of this size, to which its image is cropped."""
        if self.image is None:
            return self
        return replace(self, image=replace(self.image, size=(height, width)))

    @property
    def content(self) -> "Request":
        """The request without index and seed: everything that a model encodes."""
        return Request(self.text, image=self.image)

    def __str__(self) -> str:
        """What a model encodes, in one string; a NUL, which no text contains, separates text and image."""
        return f"{self.text}\0{self.image}" if self.image else self.text

    @property
    def key(self) -> str:
        """Content hash: requests with equal keys have equal conditionings."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:32]

    @property
    def name(self) -> str:
        """A file name made of the index and a short hash, so that no prompt can lead out of the folder."""
        return f"{self.index:04d}-{self.key[:8]}"


def read_requests(path: str | Path) -> list[Request]:
    """All requests of a file, in order. An empty or unreadable file is rejected, naming the bad line."""
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
    except OSError as error:
        raise ValueError(f"prompt file {path} cannot be read: {error.strerror}") from error

    rows = readers[path.suffix](text, path)
    requests = [
        _request(row, number, where, path.parent) for number, (where, row) in enumerate(rows)
    ]
    if not requests:
        raise ValueError(f"prompt file {path} holds no prompt")

    text_by_index: dict[int, str] = {}
    for request in requests:  # the index determines file names and the noise of validation
        if request.index in text_by_index:
            raise ValueError(
                f"{path}: index {request.index} is that of {text_by_index[request.index]!r} and of {request.text!r}"
            )
        text_by_index[request.index] = request.text
    return requests


def _request(row: dict, number: int, where: str, folder: Path) -> Request:
    """Check a row of a file. number: the index if the row has none. where: file and line, for errors."""
    unknown = sorted(str(key) for key in row if key not in COLUMNS)
    if unknown:
        raise ValueError(f"{where}: unknown column {unknown[0]!r}; known are {', '.join(COLUMNS)}")
    text = row.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: the prompt is missing or empty")
    check_text(text, where)

    index = _integer(row.get("index"), "index", where)
    seed = _integer(row.get("seed"), "seed", where)
    name = row.get("image") or None
    if name is not None and not isinstance(name, str):
        raise ValueError(
            f"{where}: image is a {type(name).__name__}; it must be the path of a file"
        )
    return Request(
        text=text,
        index=number if index is None else index,
        seed=seed,
        image=None if name is None else read_image(folder / name, where, folder),
    )


def check_text(text: str, where: str) -> None:
    """Reject text that files or tokenizers cannot handle."""
    if "\0" in text:
        raise ValueError(f"{where}: the prompt holds a NUL character")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(
            f"{where}: the prompt {text!r} holds half a character; write it as UTF-8 text"
        )


def _integer(value: object, key: str, where: str) -> int | None:
    """A whole number from a file; None for an empty cell."""
    if value is None or value == "":
        return None
    text = str(value) if isinstance(value, (str, int)) else f"a {type(value).__name__}"
    if not re.fullmatch(r"\s*\d{1,19}\s*", text) or int(text) > MAX_INTEGER:
        raise ValueError(
            f"{where}: {key} is {text[:50]!r}; it must be a whole number from 0 to {MAX_INTEGER}"
        )
    return int(text)


def _lines(text: str, path: Path) -> Iterator[tuple[str, dict]]:
    """Lines that are not empty, as (file and line, row with the line as prompt)."""
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if line.strip():
            yield f"{path} line {number}", {"prompt": line.strip()}


def _csv(text: str, path: Path) -> Iterable[tuple[str, dict]]:
    """Rows of CSV, as (file and line, row)."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        if "prompt" not in (reader.fieldnames or ()):
            raise ValueError(f"{path}: the first line must name the columns, `prompt` among them")
        return [(f"{path} line {reader.line_num}", row) for row in reader]
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num}: not CSV ({error})") from error


def _jsonl(text: str, path: Path) -> Iterator[tuple[str, dict]]:
    """JSON objects, one per line, as (file and line, row)."""
    for where, line in _lines(text, path):
        try:
            row = json.loads(line["prompt"])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected an object with the key `prompt`")
        yield where, row
