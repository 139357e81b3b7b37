"""A study: clips, pairs of them, questions. It is the first line of the answers file, and never changes afterwards.

prefs.jsonl            line 1: the study; then one line per answer or undo
prefs.clips/0042.mp4   the clips, numbered at random and without metadata

A study may come from others: its clips are regular files in its own folder, which is not a link.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sage_grpo.files.foreign import read_bytes
from sage_grpo.runs.clips import beside
from sage_grpo.runs.history import as_float

VERSION = 1
# question -> what the page asks; "overall" alone, or VideoAlign's three
QUESTIONS = {
    "overall": "Which clip is better?",
    "vq": "Which clip looks better?",
    "mq": "In which clip is the motion better?",
    "ta": "Which clip shows the prompt better?",
}
LEFT = "left"
RIGHT = "right"
TIE = "tie"
BAD = "bad"  # both are bad; counts as a tie
CHOICES = (LEFT, RIGHT, TIE, BAD)
MAX_NAME_LENGTH = 64  # characters of a rater's name
MAX_CLIP_BYTES = 1 << 30
SUFFIX = ".jsonl"  # of an answers file: pages and JSON beside it have other ones


class StudyError(ValueError):
    """What is wrong with an answers file, in one sentence."""


@dataclass(frozen=True)
class StudyClip:
    """A clip of a study."""

    file: str  # name in the study's folder of clips
    system: int  # index of the system that made it
    prompt: str
    seed: int = 0
    number: int = 0  # among the clips of one prompt and seed
    height: int = 0  # in pixels as sampled: files of tiny clips are magnified; 0: as in the file
    width: int = 0
    scores: Mapping[str, float] = field(default_factory=dict)  # by rewards that have scored it


@dataclass(frozen=True)
class Study:
    """What is compared and how."""

    systems: tuple[str, ...]
    questions: tuple[str, ...]
    clips: tuple[StudyClip, ...]
    # indices of clips, which are by different systems or by the same
    pairs: tuple[tuple[int, int], ...]
    repeat: float = 0.1  # share of the pairs that each rater sees twice
    seed: int = 0  # of the choice of pairs
    ordered: bool = False  # whether pairs are shown in the order above: those worth most come first
    created: str = ""
    secret: str = ""  # orders and sides follow from it, so that no rater can compute them; empty in old studies

    def prompt(self, pair: int) -> str:
        return self.clips[self.pairs[pair][0]].prompt


def clips_folder(answers: Path) -> Path:
    """Where the clips of a study are."""
    folder = answers.with_suffix(".clips")
    if folder.is_symlink():
        raise StudyError(f"{folder} is a link, which is not followed; replace it by the folder")
    return folder


def clip_path(answers: Path, clip: StudyClip) -> Path:
    """The file of a clip, which must lie in the study's folder of clips."""
    if not clip.file.endswith(".mp4"):
        raise StudyError(f"{answers} names the clip {clip.file!r:.60}, which is not an mp4 file")
    return beside(clips_folder(answers) / answers.name, clip.file)


def read_clip(answers: Path, clip: StudyClip) -> bytes:
    """The content of a clip's file; refuses a link, a pipe, a device and too many bytes."""
    return read_bytes(clip_path(answers, clip), MAX_CLIP_BYTES)


# the first line of the file


def to_record(study: Study) -> dict[str, Any]:
    return {
        "kind": "study",
        "version": VERSION,
        "created": study.created,
        "systems": list(study.systems),
        "questions": list(study.questions),
        "repeat": study.repeat,
        "seed": study.seed,
        "secret": study.secret,
        "ordered": study.ordered,
        "clips": [vars(clip) | {"scores": dict(clip.scores)} for clip in study.clips],
        "pairs": [list(pair) for pair in study.pairs],
    }


def from_record(record: Any, where: str) -> Study:
    """The study in the first line of a file; StudyError if it is none."""
    if not isinstance(record, dict) or record.get("kind") != "study":
        raise StudyError(f"{where} does not begin with a study; it is not a file of answers")
    if record.get("version") != VERSION:
        raise StudyError(
            f"{where} has version {record.get('version')!r:.20}, but only {VERSION} is known"
        )
    try:
        study = Study(
            systems=tuple(_text(name) for name in record["systems"]),
            questions=tuple(_text(name) for name in record["questions"]),
            clips=tuple(_clip(clip) for clip in record["clips"]),
            pairs=tuple(_pair(pair) for pair in record["pairs"]),
            repeat=float(record["repeat"]),
            seed=int(record["seed"]),
            ordered=bool(record["ordered"]),
            created=_text(record["created"]),
            secret=_text(record.get("secret", "")),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StudyError(
            f"{where} has a damaged study ({type(error).__name__}: {error!s:.100})"
        ) from error
    _check(study, where)
    return study


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is not a text")
    value.encode()  # rejects halves of characters (surrogates), which JSON can name but no page can show
    return value


def _clip(values: Any) -> StudyClip:
    if not isinstance(values, dict) or not isinstance(values.get("scores"), dict):
        raise TypeError(f"{values!r:.60} is not a clip with scores")
    scores = {_text(name): _score(value) for name, value in values["scores"].items()}
    return StudyClip(
        file=_text(values["file"]),
        system=int(values["system"]),
        prompt=_text(values["prompt"]),
        seed=int(values["seed"]),
        number=int(values["number"]),
        height=int(values["height"]),
        width=int(values["width"]),
        scores=scores,
    )


def _score(value: Any) -> float:
    score = as_float(value, "a score")
    if math.isnan(score):  # squares of what is too large overflow
        raise ValueError(f"the score {value!r:.40} is no usable number")
    return score


def _pair(values: Any) -> tuple[int, int]:
    first, second = values
    return int(first), int(second)


def _check(study: Study, where: str) -> None:
    """Reject a study whose parts do not fit together."""
    num_clips = len(study.clips)
    problems = []
    if not study.pairs:
        problems.append("it has no pairs")
    if any(not 0 <= clip.system < len(study.systems) for clip in study.clips):
        problems.append("a clip names a system that is not listed")
    if any(not (0 <= a < num_clips and 0 <= b < num_clips) or a == b for a, b in study.pairs):
        problems.append("a pair names a clip that is not listed")
    unknown = [name for name in study.questions if name not in QUESTIONS]
    is_repeated = len(set(study.questions)) < len(study.questions)
    if unknown or is_repeated or not study.questions:
        problems.append(f"its questions are {', '.join(study.questions)[:60]}")
    if not 0 <= study.repeat <= 1:
        problems.append(f"repeat is {study.repeat:g}")
    if problems:
        raise StudyError(f"{where} has a damaged study: {problems[0]}")


def check_raters(names: Sequence[str]) -> None:
    """Reject names that are empty, long, unprintable or given twice."""
    for name in names:
        if not name.strip() or len(name) > MAX_NAME_LENGTH or not name.isprintable():
            raise StudyError(
                f"a rater is called {name[:80]!r}; give 1 to {MAX_NAME_LENGTH} printable characters"
            )
    if len(set(names)) < len(names):
        raise StudyError("two raters have the same name; their answers would be mixed up")
