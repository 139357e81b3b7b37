"""One run of a study, in a process forked from one that has imported everything: that saves a run its imports."""

import os
import sys
from pathlib import Path

import post_train
from sage_grpo.models.hunyuan15 import backbone  # noqa: F401, imported for the fork, as the next three
from sage_grpo.rewards import videoalign  # noqa: F401
from sage_grpo.tools import report  # noqa: F401
from sage_grpo.train import build, console  # noqa: F401
from studies import path_kl
from studies.questions import ROOT


def train(arguments: list[str], with_path_kl: bool, log: Path) -> None:
    """Train as post_train.py does, then measure the path KL if asked, and exit with the code. Output goes to `log`."""
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(ROOT)  # the recipe names the model relative to the repository
    sys.exit(path_kl.main(arguments) if with_path_kl else post_train.main(arguments))
