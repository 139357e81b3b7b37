"""What people preferred: RUN/preferences.json, which `tools/prefer result` writes beside RUN/preferences.html.

The report and the model card show it if it is there.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_grpo.files.foreign import check_regular
from sage_grpo.files.json_files import read_object
from sage_grpo.runs.history import RunError, as_float

NAME = "preferences.json"
KIND = "preferences"


@dataclass(frozen=True)
class Preference:
    """How often people preferred a system to another, for one question; ties count half."""

    question: str
    system: str
    other: str  # that it was compared with
    win_rate: float  # of `system`
    low: float  # 95 % interval
    high: float
    answers: int
    raters: int

    def __str__(self) -> str:
        return (
            f"{self.win_rate:.0%} ({self.low:.0%} to {self.high:.0%}) "
            f"of {self.answers} answers by {self.raters} {'rater' if self.raters == 1 else 'raters'}"
        )


def read_preferences(run: Path) -> list[Preference]:
    """The comparisons of a run's study; empty if there is none."""
    check_regular(run, (NAME,))
    path = run / NAME
    if not path.is_file():
        return []
    record = read_object(path)
    try:
        if record["kind"] != KIND:
            raise ValueError(f"its kind is {record['kind']!r:.40}")
        raters = len(record["raters"])
        return [
            _preference(question, comparison, raters)
            for question, part in record["questions"].items()
            for comparison in part["comparisons"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(
            f"{path} is damaged ({type(error).__name__}: {error!s:.80}); write it again with `prefer result`"
        ) from error


def _preference(question: Any, comparison: Any, raters: int) -> Preference:
    win_rate = comparison["win_rate"]
    return Preference(
        question=str(question),
        system=str(comparison["system"]),
        other=str(comparison["other"]),
        win_rate=as_float(win_rate["mean"], "win_rate"),
        low=as_float(win_rate["low"], "low"),
        high=as_float(win_rate["high"], "high"),
        answers=int(win_rate["count"]),
        raters=raters,
    )
