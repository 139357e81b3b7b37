"""Every program lets OpenMP's threads sleep while they wait, before torch reads how they should."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# runs a program until it imports torch, and prints what torch would read
WATCH = """
import os, runpy, sys

class AtTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("policy:", os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, AtTorch())
program, run_name, *sys.argv[1:] = sys.argv[1:]
sys.path.insert(0, os.getcwd())
if program.endswith(".py"):
    runpy.run_path(program, run_name=run_name)
else:
    runpy.run_module(program, run_name=run_name)
"""
MODULE = "imported"  # torch is imported before main, whatever the arguments are
PROGRAMS = [
    ("post_train.py", "__main__", "--config", "configs/tiny_cpu.yaml"),
    ("generate.py", "__main__", "--model_path", "assets/tiny", "--prompt", "a red circle"),
    ("scripts/audit_reward.py", MODULE),
    ("scripts/reward_server.py", MODULE),
    ("scripts/export_checkpoint.py", MODULE),
    (
        "scripts/encode_prompts.py",
        "__main__",
        "--model_root",
        "assets/tiny",
        "--prompt_cache",
        "none",
    ),
    ("scripts/convert_weights.py", "__main__", "README.md"),
    ("sage_grpo.tools.doctor.__main__", MODULE),
    ("sage_grpo.tools.plan.__main__", MODULE),
    ("sage_grpo.tools.evaluate", MODULE),
    ("sage_grpo.tools.report.__main__", MODULE),
    ("sage_grpo.tools.diagnose", MODULE),
]


def policy(program, **variables):
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", WATCH, *program]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, timeout=60
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("policy:")]
    return line.removeprefix("policy: ")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program[0])
def test_threads_sleep_while_they_wait(program):
    assert policy(program) == "PASSIVE"


def test_the_user_decides():
    assert policy(PROGRAMS[0], OMP_WAIT_POLICY="ACTIVE") == "ACTIVE"
