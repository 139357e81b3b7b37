"""Run every planner command in research/benchmarks/scaling.md and put its output below it.

    python -m research.benchmarks.scaling_tables

Run it after changing the calibration, the planner or a recipe. The tables of recipes in README.md, docs/scaling.md and
this page get the planner's figures, too (research/benchmarks/recipe_tables.py).
"""

import argparse
import contextlib
import io
import re
import shlex
import tempfile
from pathlib import Path

from research.benchmarks import recipe_tables
from sage_grpo.tools.plan.__main__ import main as plan

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "research" / "benchmarks" / "scaling.md"
BLOCK = re.compile(
    r"^(\$ python -m sage_grpo\.tools\.plan ((?:[^\n]*\\\n)*[^\n]*)\n).*?^```",
    re.DOTALL | re.MULTILINE,
)


def output_of(command: str) -> str:
    """The planner's output for these flags, in a folder without models, whether the run fits or not."""
    flags = command.replace("\\\n", " ").replace("configs/", f"{ROOT}/configs/")
    output = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as empty,
        contextlib.redirect_stdout(output),
        contextlib.chdir(empty),
    ):
        try:
            plan(shlex.split(flags))
        except SystemExit as end:
            raise ValueError(
                f"research/benchmarks/scaling.md has a command that cannot run: {command}"
            ) from end
    return output.getvalue()


def refreshed(text: str) -> str:
    """The page with all tables regenerated."""
    return BLOCK.sub(lambda match: f"{match[1]}{output_of(match[2])}```", text)


def main(arguments: list[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=form).parse_args(arguments)
    PAGE.write_text(refreshed(PAGE.read_text()))
    recipe_tables.main()


if __name__ == "__main__":
    main()
