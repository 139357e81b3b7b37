"""Run every planner command that stands in docs/scaling.md and put what it prints below it.

python scripts/scaling_tables.py        after a change of the calibration, the planner or a recipe
"""

import contextlib
import io
import re
import shlex
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from sage_grpo.tools.plan import main as plan

PAGE = ROOT / "docs" / "scaling.md"
BLOCK = re.compile(r"^(\$ python -m sage_grpo\.tools\.plan ((?:[^\n]*\\\n)*[^\n]*)\n).*?^```", re.DOTALL | re.MULTILINE)


def output_of(command: str) -> str:
    """What the planner prints for these flags, in a place without model folders, whether the run fits or not."""
    printed, flags = io.StringIO(), command.replace("\\\n", " ").replace("configs/", f"{ROOT}/configs/")
    with tempfile.TemporaryDirectory() as empty, contextlib.redirect_stdout(printed), contextlib.chdir(empty):
        if plan(shlex.split(flags)) > 1:
            raise ValueError(f"docs/scaling.md has a command that cannot run: {command}")
    return printed.getvalue()


def refreshed(text: str) -> str:
    """The page with all tables made anew."""
    return BLOCK.sub(lambda match: f"{match[1]}{output_of(match[2])}```", text)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text()))
