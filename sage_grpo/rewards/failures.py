"""What a failing reward leaves behind: a sentence that names the user's line, and once its traceback in the log."""

import sys
import sysconfig
import traceback
from pathlib import Path

from sage_grpo.plugins import error_text

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
INSTALLED = {Path(sysconfig.get_path(name)).resolve() for name in LIBRARIES}

_printed: set[str] = set()  # sentences whose traceback is in the log


def failure_text(name: str, error: Exception) -> str:
    """The failure of the reward `name` in one sentence; the first of its kind also prints its traceback."""
    text = f"{name}: {error_text(error)}"
    frame = user_frame(error)
    place = f" ({frame})" if frame else ""
    kind = f"{name}: {type(error).__name__}{place}"
    if kind not in _printed:
        _printed.add(kind)
        lines = "".join(traceback.format_exception(error))
        print(f"note: the reward {name} failed:\n{lines}", file=sys.stderr, end="", flush=True)
    return text + place


def user_frame(error: BaseException | None) -> str:
    """`FILE:LINE in FUNCTION`: the last frame that is neither this package's nor an installed library's."""
    while error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if _is_users(frame.filename):
                return f"{_short(frame.filename)}:{frame.lineno} in {frame.name}"
        error = error.__cause__
    return ""


def _is_users(filename: str) -> bool:
    path = Path(filename).resolve()
    if filename.startswith("<") or path.is_relative_to(PACKAGE):
        return False
    return not any(path.is_relative_to(folder) for folder in INSTALLED)


def _short(filename: str) -> str:
    """Relative to the working directory if it is below it."""
    path = Path(filename).resolve()
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return str(path)
