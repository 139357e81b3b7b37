"""One run of a study: training, as post_train.py does it, and what is measured at its end.

It is forked from a process that has imported everything, which saves a run its imports.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import post_train
from research.studies import path_kl, spread
from research.studies.questions import ROOT
from sage_grpo.config.parse import parse
from sage_grpo.exit_codes import DONE
from sage_grpo.files.json_files import write_json
from sage_grpo.models.hunyuan15 import backbone  # noqa: F401, imported before the fork, as the next three
from sage_grpo.rewards.videoalign import reward as videoalign  # noqa: F401
from sage_grpo.tools.report import page as report  # noqa: F401
from sage_grpo.train import build, console  # noqa: F401

MEASURES = {"path_kl": path_kl.measure, "spread": spread.measure}


def train_and_measure(arguments: Sequence[str], measured: Sequence[str]) -> int:
    """Train, then write NAME.json into the run's folder for each of the measures `measured`; returns the exit code."""
    code = post_train.main(list(arguments))
    if code == DONE:
        config = parse(list(arguments))
        for name in measured:
            write_json(Path(config.output_dir) / f"{name}.json", MEASURES[name](config))
    return code


def train(arguments: list[str], measured: Sequence[str], log: Path) -> None:
    """Train and measure, and exit with the code. Output goes to `log`."""
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(ROOT)  # the recipe names the model relative to the repository
    sys.exit(train_and_measure(arguments, measured))
