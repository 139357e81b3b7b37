"""The answers file: JSON lines, appended and synced one by one. Nothing is ever rewritten; an undo is a line too.

A crash can leave half a line at the end, which is cut off when the file is opened again: its answer was never
confirmed to the rater. A complete line that lacks only its newline, as some editors leave it, is kept. Half a line
anywhere else is damage, and is reported.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_grpo.files.foreign import new_name
from sage_grpo.tools.prefer.pairs import Trial
from sage_grpo.tools.prefer.study import (
    BAD,
    CHOICES,
    LEFT,
    TIE,
    Study,
    StudyError,
    check_raters,
    clips_folder,
    from_record,
    to_record,
)

MAX_SECONDS = 1e9  # of an answer


@dataclass(frozen=True)
class Answer:
    """What a rater said in one trial."""

    rater: str
    trial: int  # number in the rater's schedule
    pair: int
    swapped: bool
    repeat: bool
    choices: Mapping[str, str]  # question -> left, right, tie, bad
    seconds: float = 0.0  # from the moment the clips were shown

    def outcome(self, question: str) -> float:
        """1 if the pair's first clip was preferred, 0 if the second, 1/2 for a tie or two bad clips."""
        choice = self.choices[question]
        if choice in (TIE, BAD):
            return 0.5
        return float((choice == LEFT) != self.swapped)


def read_answers(path: Path) -> tuple[Study, list[Answer]]:
    """The study and all answers that were not taken back, in the order in which they were given."""
    study, answers, _ = _read(path)
    return study, answers


def _read(path: Path) -> tuple[Study, list[Answer], int]:
    """Study, answers, and how many bytes of the file are complete lines."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; `label` writes it")
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if _is_object(content[complete:]):
        complete = len(content)
    lines = content[:complete].splitlines()
    if not lines:
        raise StudyError(f"{path} is empty; delete it")
    study = from_record(_record(lines[0], f"{path}, line 1"), str(path))

    given: dict[tuple[str, int], Answer] = {}
    for number, line in enumerate(lines[1:], 2):
        where = f"{path}, line {number}"
        record = _record(line, where)
        if record.get("kind") == "undo":
            given.pop(_undone(record, where), None)
            continue
        answer = _answer(record, study, where)
        given[answer.rater, answer.trial] = answer
    return study, list(given.values()), complete


def _is_object(line: bytes) -> bool:
    """Whether a line is complete: no part of a JSON object is one itself."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise StudyError(f"{where} is not JSON ({error}); repair or delete that line") from error
    if not isinstance(record, dict):
        raise StudyError(f"{where} is not an object; delete that line")
    return record


def _undone(record: Mapping[str, Any], where: str) -> tuple[str, int]:
    """Rater and trial of the answer that a line takes back."""
    rater = record.get("rater")
    trial = record.get("trial")
    if not isinstance(rater, str) or type(trial) is not int:
        raise StudyError(f"{where} takes back no rater's answer; delete that line")
    return rater, trial


def _answer(record: Mapping[str, Any], study: Study, where: str) -> Answer:
    """An answer of a line; StudyError if it does not fit the study."""
    choices = record.get("answers")
    seconds = record.get("seconds", 0)
    fits = (
        record.get("kind") == "answer"
        and isinstance(record.get("rater"), str)
        and type(record.get("trial")) is int
        and type(record.get("pair")) is int
        and 0 <= record["pair"] < len(study.pairs)
        and isinstance(choices, dict)
        and set(choices) == set(study.questions)
        and all(choice in CHOICES for choice in choices.values())
        and type(seconds) in (int, float)
        and 0 <= seconds <= MAX_SECONDS
    )
    if not fits:
        raise StudyError(f"{where} is not an answer to this study; delete that line")
    check_raters([record["rater"]])
    return Answer(
        rater=record["rater"],
        trial=record["trial"],
        pair=record["pair"],
        swapped=bool(record.get("swapped")),
        repeat=bool(record.get("repeat")),
        choices=choices,
        seconds=float(seconds),
    )


class AnswersFile:
    """An answers file, open for appending by this process alone until it is closed or the process ends."""

    def __init__(self, path: Path, new_study: Study | None = None) -> None:
        """Open an existing file, or create it with `new_study` as its first line."""
        self.path = path
        if new_study is not None:
            _create(path, new_study)
        self.handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            lock(self.handle, path)
            self._check_place()
            self.study, answers, complete = _read(path)
            cut = os.fstat(self.handle).st_size - complete
            if cut:
                os.ftruncate(self.handle, complete)
                os.fsync(self.handle)
            if os.pread(self.handle, 1, complete - 1) != b"\n":
                self._write(b"\n")
            self.cut_bytes = cut  # of an answer that was being written when a server died
        except BaseException:
            self.close()
            raise

        self.answers: dict[str, dict[int, Answer]] = {}  # by rater and trial
        for answer in answers:
            self.answers.setdefault(answer.rater, {})[answer.trial] = answer

    def _check_place(self) -> None:
        """Reject a file that was moved or replaced since it was opened: answers would go to one that nobody reads."""
        if not os.path.samestat(os.fstat(self.handle), os.lstat(self.path)):
            raise OSError(
                f"{self.path} was replaced while it was in use, perhaps by an editor; "
                "end `label` and start it again"
            )

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1

    def of(self, rater: str) -> Mapping[int, Answer]:
        """The answers of a rater by trial, oldest first."""
        return self.answers.get(rater, {})

    def add(
        self, rater: str, number: int, trial: Trial, choices: Mapping[str, str], seconds: float
    ) -> None:
        """Append an answer; it is on disk when this returns."""
        record = {
            "kind": "answer",
            "rater": rater,
            "trial": number,
            "pair": trial.pair,
            "swapped": trial.swapped,
            "repeat": trial.repeat,
            "answers": dict(choices),
            "seconds": round(seconds, 2),
        }
        self._append(record)
        answer = Answer(
            rater, number, trial.pair, trial.swapped, trial.repeat, dict(choices), seconds
        )
        self.answers.setdefault(rater, {})[number] = answer

    def undo(self, rater: str) -> bool:
        """Take back a rater's last answer; False if there is none."""
        given = self.answers.get(rater)
        if not given:
            return False
        last = next(reversed(given))
        self._append({"kind": "undo", "rater": rater, "trial": last})
        del given[last]
        return True

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps({**record, "time": time.strftime("%FT%T%z")}, ensure_ascii=False) + "\n"
        self._write(line.encode())

    def _write(self, data: bytes) -> None:
        start = os.fstat(self.handle).st_size
        try:
            written = os.write(self.handle, data)
            if written < len(data):
                raise OSError(f"{self.path} could not be written; is the disk full?")
            os.fsync(self.handle)
            self._check_place()
        except OSError:
            os.ftruncate(self.handle, start)  # the rater sees the error and answers again
            raise


def lock(handle: int, path: Path) -> None:
    """Lock an open file; the kernel releases it when the process ends, however it ends."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StudyError(
            f"{path} is in use by another `label`; stop that one, or give another --output"
        ) from None


@contextmanager
def locked_clips(answers: Path) -> Iterator[Path]:
    """The folder of clips of a study that is being made, which this process alone fills."""
    folder = clips_folder(answers)
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(folder / ".lock", flags, 0o644)
    try:
        lock(handle, folder)
        yield folder
    finally:
        os.close(handle)


def _create(path: Path, study: Study) -> None:
    """Write a new file with the study alone: complete or not at all."""
    record = to_record(study)
    from_record(record, str(path))  # before there is a file that cannot be read back
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = new_name(path)
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)  # unlike a rename, it replaces nothing
    except FileExistsError:
        raise StudyError(f"{path} exists already") from None
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
