"""Runs the launchers of this repository with a known environment."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRAIN = "scripts/post_train/train_grpo.sh"
PDSH = "scripts/post_train/pdsh_train.sh"


def environment(**settings):
    """What a launcher sees: the usual programs, this Python, and the settings; nothing else that may be set here."""
    kept = {
        name: os.environ[name] for name in ("PATH", "HOME", "OMP_WAIT_POLICY") if name in os.environ
    }
    return (
        kept
        | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        | {k: str(v) for k, v in settings.items()}
    )


def launch(script, *words, cwd=ROOT, **settings):
    command = ["bash", str(ROOT / script), *map(str, words)]
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(**settings),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def commands(script, *words, **settings):
    """What a dry run prints, node by node: the words that a shell makes of the torchrun command."""
    result = launch(script, "--dry_run", *words, **settings)
    assert result.returncode == 0, result.stderr
    return [read_back(line) for line in result.stdout.splitlines() if line.startswith("env ")]


def read_back(line):
    """The words of a command line as bash reads them, without running it."""
    show = ["bash", "-c", f"printf '%s\\0' {line}"]
    return subprocess.run(show, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


def options(words):
    """Flags of a command with the value that is given last; a flag without one has True."""
    found = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word[2:]] = True if following.startswith("--") else following
    return found


def program(folder, name, text):
    """A shell script in `folder`, to be found before the real program of that name."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"
