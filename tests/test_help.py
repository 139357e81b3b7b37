"""Every program: help and wrong flags are answered before anything heavy is imported, and nothing is launched."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from sage_grpo import __version__

ROOT = Path(__file__).parents[1]
NAMES = ("diagnose", "doctor", "evaluate", "plan", "prefer", "publish", "report", "watch")
TOOLS = [f"sage_grpo.tools.{name}" for name in NAMES]
SCRIPTED = (
    "audit_reward",
    "convert_weights",
    "encode_prompts",
    "export_checkpoint",
    "reward_server",
)
SCRIPTS = [f"scripts/{name}.py" for name in SCRIPTED]
PROGRAMS = ["post_train.py", "generate.py", *TOOLS, *SCRIPTS]
LAUNCHERS = [
    "run_post_train.sh",
    "run_post_train_multinode.sh",
    "run_inference.sh",
    "scripts/post_train/train_grpo.sh",
    "scripts/post_train/pdsh_train.sh",
    "scripts/post_train/slurm.sh",
]
CALLS = """
import contextlib, io, json, runpy, sys
sys.path[0] = {folder!r}
answers = {{}}
for word in ("--help", "--verison", "--version"):
    sys.argv = [{name!r}, word]
    code = None
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            if {name!r}.endswith(".py"):
                runpy.run_path({name!r}, run_name="__main__")
            else:
                runpy.run_module({name!r}, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
    answers[word] = (code, out.getvalue(), err.getvalue())
heavy = {{"torch", "transformers", "diffusers", "matplotlib", "scipy", "uvicorn"}} & sys.modules.keys()
print(json.dumps([answers, sorted(heavy)]))
"""


@cache
def answers_of(name):
    """Exit code, output and errors of a program by the flag it is called with, and what heavy it has imported."""
    folder = str(ROOT / name.rpartition("/")[0]) if name.endswith(".py") else str(ROOT)
    command = [sys.executable, "-c", CALLS.format(name=name, folder=folder)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(process.stdout)


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_and_wrong_flags_need_no_torch(name):
    answers, heavy = answers_of(name)
    assert heavy == []

    code, helped, errors = answers["--help"]
    assert code in (0, None) and errors == ""
    assert helped.startswith("usage: ")
    assert "--version" in helped

    code, _, errors = answers["--verison"]
    (sentence,) = errors.splitlines()
    assert code == 2
    assert "unknown flag --verison; did you mean --version?" in sentence

    assert answers["--version"][1] == f"sage-grpo {__version__}\n"


@pytest.mark.parametrize("name", [*PROGRAMS, "scripts/verify_weights.py"])
def test_every_argument_says_what_it_is_and_what_kind_of_value_it_takes(name):
    answers, _ = answers_of(name)
    text = answers["--help"][1]
    _, arguments = re.split("(?:positional arguments|options):", text, maxsplit=1)
    lines = arguments.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if not re.match(r"  \S", line) or line.endswith(":"):
            continue
        has_help = "  " in line.strip() or re.match(r" {8} *\S", following)
        is_flag_or_metavar = re.match(r"  (-|[A-Z])", line)
        repeats_its_name = re.match(r"  --(\w+)[ =]\1\b", line, re.IGNORECASE)
        assert has_help, line
        assert is_flag_or_metavar, line
        assert not repeats_its_name, f"{line}: what kind of value?"


def test_downloads_are_verified_before_anything_is_installed():
    # -S: the standard library only
    command = [sys.executable, "-I", "-S", "scripts/verify_weights.py", "--help"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout.startswith("usage: ")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_that_is_asked_for_help_launches_nothing(name, tmp_path):
    process = subprocess.run(
        ["bash", str(ROOT / name), "--eta", "1", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0
    assert process.stderr == ""
    assert Path(name).name in process.stdout
    assert "#" not in process.stdout
    assert not list(tmp_path.iterdir())
