"""A start that is refused under torchrun: its restarts answer at once.

torchrun restarts workers whatever they died of, `--max_restarts` times. A wrong flag or a run folder in use stays what
it is, but each restart would load the model, and wait for the other run, again. So a refused worker leaves its sentence
in torchrun's folder of this attempt, and the worker of the next attempt repeats it before it does anything else.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

# torchrun's name for the error file of a worker, in the folder .../attempt_N/LOCAL_RANK
VARIABLE = "TORCHELASTIC_ERROR_FILE"
NAME = "refused.txt"


def note_refusal(text: str) -> None:
    """Leave the sentence for the next attempt, if torchrun has started this process."""
    folder = _attempt_folder()
    if folder is not None:
        with suppress(OSError):  # the restart then costs a whole start
            (folder / NAME).write_text(text)


def earlier_refusal() -> str:
    """Why the previous attempt was refused; empty if it was not, or if there was none."""
    folder = _attempt_folder()
    if folder is None:
        return ""
    number = int(folder.parent.name.removeprefix("attempt_"))
    previous = folder.parent.with_name(f"attempt_{number - 1}") / folder.name / NAME
    try:
        text = previous.read_text()
    except (OSError, ValueError):
        return ""
    note_refusal(text)  # for the attempt after this one
    return text


def _attempt_folder() -> Path | None:
    """torchrun's folder for this worker; None without torchrun."""
    file = os.environ.get(VARIABLE)
    if not file:
        return None
    folder = Path(file).parent
    return folder if re.fullmatch(r"attempt_\d+", folder.parent.name) else None
