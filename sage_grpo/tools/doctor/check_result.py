"""What a check reports, and how that is printed."""

import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

OK = "ok"
NOTE = "note"
WRONG = "WRONG"

LINE_WIDTH = 120
TEXT_COLUMN = 18  # where the text of a result begins, and where its table is indented to

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class CheckResult:
    """One line of the doctor's report; `numbers` are what doctor.json keeps of the measurement."""

    check: str
    mark: str
    text: str
    remedy: str = ""  # of a result that is WRONG
    table: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_wrong(self) -> bool:
        return self.mark == WRONG

    def __str__(self) -> str:
        indent = " " * TEXT_COLUMN
        paragraphs = [f"{self.mark:<6}{self.check:<12}{self.text}"]
        if self.remedy:
            paragraphs.append(f"{indent}remedy: {self.remedy}")
        lines = [
            textwrap.fill(text, LINE_WIDTH, subsequent_indent=indent, break_on_hyphens=False)
            for text in paragraphs
        ]
        if self.table:
            lines.append(self.table)
        return "\n".join(lines)


def ok(
    check: str, text: str, table: str = "", numbers: Mapping[str, Any] | None = None
) -> CheckResult:
    return CheckResult(check, OK, text, table=table, numbers=numbers or {})


def note(check: str, text: str, numbers: Mapping[str, Any] | None = None) -> CheckResult:
    """Something that runs, but may not be what the user intended."""
    return CheckResult(check, NOTE, text, numbers=numbers or {})


def wrong(
    check: str,
    text: str,
    remedy: str = "",
    table: str = "",
    numbers: Mapping[str, Any] | None = None,
) -> CheckResult:
    return CheckResult(check, WRONG, text, remedy, table, numbers or {})


def indented(table: str) -> str:
    """A table below the text of a result."""
    return textwrap.indent(table, " " * TEXT_COLUMN)


def run_check(
    name: str, check: Callable[[Subject], Iterator[CheckResult]], subject: Subject
) -> Iterator[CheckResult]:
    """The results of a check; one that raises an error is WRONG, too."""
    try:
        yield from check(subject)
    except (ValueError, OSError, RuntimeError) as error:
        yield interrupted(name, error)


def interrupted(check: str, error: Exception) -> CheckResult:
    """A check that ended with an error."""
    kind = type(error).__name__
    first_line = str(error).partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError):
        remedy = (
            "lower micro_batch_size or the size of the clips, "
            "or set enable_gradient_checkpointing True"
        )
    else:
        remedy = "doctor.json has the traceback"
    return wrong(
        check,
        f"the check ended with {kind}: {first_line}",
        remedy,
        numbers={"kind": kind, "error": str(error), "traceback": traceback.format_exc()},
    )
