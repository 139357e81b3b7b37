"""Prompt files: .txt (one per line), .csv (`prompt`, optional `index` and `seed`), .jsonl (the same keys)."""

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

COLUMNS = ("prompt", "index", "seed")


@dataclass(frozen=True)
class Prompt:
    """A prompt, its number, and the seed that validation and generation use for it (training never does)."""

    text: str
    index: int
    seed: int | None = None

    @property
    def name(self) -> str:
        """A file name that no prompt can lead out of its folder: number and a short hash."""
        return f"{self.index:04d}-{hashlib.sha256(self.text.encode()).hexdigest()[:8]}"


def read_prompts(path: str | Path) -> list[Prompt]:
    """All prompts of a file, in order. An empty or unreadable file is refused with the line that is wrong."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"prompt file {path} does not exist")
    readers = {".txt": _txt, ".csv": _csv, ".jsonl": _jsonl}
    if path.suffix not in readers:
        raise ValueError(f"prompt file {path} must end in {', '.join(readers)}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {path} is not UTF-8 text: {error}") from error
    prompts = [_prompt(row, number, where) for number, (where, row) in enumerate(readers[path.suffix](text, path))]
    if not prompts:
        raise ValueError(f"prompt file {path} holds no prompt")
    seen: dict[int, str] = {}
    for prompt in prompts:  # files and noise are named after the index
        if prompt.index in seen:
            raise ValueError(f"{path}: index {prompt.index} is that of {seen[prompt.index]!r} and of {prompt.text!r}")
        seen[prompt.index] = prompt.text
    return prompts


def _prompt(row: dict, number: int, where: str) -> Prompt:
    unknown = sorted(str(key) for key in row if key not in COLUMNS)
    if unknown:
        raise ValueError(f"{where}: unknown column {', '.join(unknown)}; known are {', '.join(COLUMNS)}")
    text = row.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: the prompt is missing or empty")
    if "\0" in text:
        raise ValueError(f"{where}: the prompt holds a NUL character")
    index, seed = (_integer(row.get(key), key, where) for key in ("index", "seed"))
    return Prompt(text, number if index is None else index, seed)


def _integer(value: object, key: str, where: str) -> int | None:
    if value is None or value == "":
        return None
    try:
        number = int(str(value))
    except ValueError as error:
        raise ValueError(f"{where}: {key} is {value!r}, not a whole number") from error
    if number < 0:
        raise ValueError(f"{where}: {key} is {number}; it must be at least 0")
    return number


def _txt(text: str, path: Path) -> Iterator[tuple[str, dict]]:
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if line.strip():
            yield f"{path} line {number}", {"prompt": line.strip()}


def _csv(text: str, path: Path) -> Iterable[tuple[str, dict]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if "prompt" not in (reader.fieldnames or ()):
        raise ValueError(f"{path}: the first line must name the columns, `prompt` among them")
    return ((f"{path} line {reader.line_num}", row) for row in reader)


def _jsonl(text: str, path: Path) -> Iterator[tuple[str, dict]]:
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path} line {number}: expected an object with the key `prompt`")
        yield f"{path} line {number}", row
