"""What a rank sees when research/benchmarks/one_gpu is on PYTHONPATH, and what is recorded of its phases."""

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "research" / "benchmarks" / "one_gpu"
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"
PHASES = """
import torch
from sage_grpo.models.embeddings import Embeddings
from sage_grpo.models.sample import denoise
from sage_grpo.train.metrics import Stopwatch
watch = Stopwatch(torch.device("cpu"))
for _ in range(2):
    with watch.phase("rollout"):
        try:
            Embeddings.prepare(None, None)
        except TypeError:
            pass
print(sorted(watch.seconds))
"""
THREE_ROLLOUTS = """
import pathlib, time, phase_records
recorder = phase_records.Recorder(pathlib.Path("{}"))
for _ in range(3):
    with recorder.phase("rollout"):
        time.sleep(2)
"""


def run(code, **settings):
    kept = {
        name: os.environ[name] for name in ("PATH", "HOME", "OMP_WAIT_POLICY") if name in os.environ
    }
    path = os.pathsep.join([str(FOLDER), str(ROOT)])
    environment = (
        kept | {"PYTHONPATH": path} | {name: str(value) for name, value in settings.items()}
    )
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_rank_is_another_host_on_the_first_gpu():
    seen = json.loads(run(SHOW, RANK=3, LOCAL_RANK=3, NCCL_SOCKET_IFNAME="eth0").stdout)
    assert (seen["NCCL_HOSTID"], seen["LOCAL_RANK"]) == ("rank3", "0")
    assert (seen["NCCL_NET"], seen["NCCL_SHM_DISABLE"], seen["NCCL_SOCKET_IFNAME"]) == (
        "Socket",
        "1",
        "eth0",
    )
    assert "CUDA_MPS_PIPE_DIRECTORY" not in seen


def test_restarted_ranks_leave_the_mps_server_of_the_killed_one():
    seen = json.loads(
        run(SHOW, RANK=0, TORCHELASTIC_RESTART_COUNT=1, CUDA_MPS_PIPE_DIRECTORY="/tmp/pipe").stdout
    )
    assert not Path(seen["CUDA_MPS_PIPE_DIRECTORY"]).exists()


def test_other_processes_are_left_alone(tmp_path):
    seen = json.loads(run(SHOW, LOCAL_RANK=3, PHASES=tmp_path / "phases").stdout)
    assert seen["LOCAL_RANK"] == "3" and not [name for name in seen if name.startswith("NCCL")]
    assert not (tmp_path / "phases").exists()


@pytest.mark.slow
def test_phases_are_recorded_with_what_they_contain(tmp_path):
    """Slow: a real process that loads torch."""
    result = run(PHASES, PHASES=tmp_path, RANK=1)
    assert result.returncode == 0 and result.stdout == "['rollout']\n", result.stderr
    (file,) = tmp_path.glob("rank-00001-*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    order = [(record["event"], record["phase"]) for record in records]
    inside = [
        ("begin", "rollout"),
        ("begin", "encode prompts"),
        ("end", "encode prompts"),
        ("end", "rollout"),
    ]
    assert order == [("start", ""), *inside, *inside]
    times = [record["time"] for record in records]
    assert times == sorted(times) and records[-1]["seconds"] >= records[-2]["seconds"] > 0
    assert 0 < records[-1]["host_gb"] < 10 and "phase_records.py" not in result.stderr


@pytest.mark.slow
def test_a_rank_is_killed_in_the_phase_that_is_named(tmp_path):
    """Slow: real ranks; tests/train/test_faults.py kills them in every phase."""
    code = THREE_ROLLOUTS.format(tmp_path)
    assert run(code, RANK=1, KILL="1:2:rollout").returncode == -signal.SIGKILL
    (file,) = tmp_path.glob("rank-00001-*.jsonl")
    events = [json.loads(line)["event"] for line in file.read_text().splitlines()]
    assert events == ["start", "begin", "end", "begin", "kill"]
    for others in ({"RANK": 0}, {"RANK": 1, "TORCHELASTIC_RESTART_COUNT": 1}):
        assert run(code, KILL="1:2:rollout", **others).returncode == 0


def test_everything_that_is_recorded_exists():
    sys.path.insert(0, str(FOLDER))
    try:
        import phase_records
    finally:
        sys.path.remove(str(FOLDER))
    for module, paths in phase_records.PHASES.items():
        for path in paths:
            owner = importlib.import_module(
                module
            )  # KeyError and AttributeError name what was renamed
            assert callable(functools.reduce(getattr, path.split("."), owner)), path


MPS = """#!/bin/bash
if [[ ${1:-} == -d ]]; then [[ -d $CUDA_MPS_PIPE_DIRECTORY ]] && exit $FAILS; fi
read -r order; echo "$order" >>"$SAID"
"""
MPS_SEEN = "import os, phase_records; print(os.getcwd(), 'CUDA_MPS_PIPE_DIRECTORY' in os.environ)"


@pytest.mark.parametrize("fails", [0, 1])
def test_the_script_runs_a_command_with_mps_if_it_can(tmp_path, fails):
    (tmp_path / "nvidia-cuda-mps-control").write_text(MPS)
    (tmp_path / "nvidia-cuda-mps-control").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {"PATH": path, "SAID": str(tmp_path / "said"), "FAILS": str(fails), "HOME": "/"}
    command = [
        "bash",
        str(ROOT / "research" / "benchmarks" / "nccl_one_gpu.sh"),
        sys.executable,
        "-c",
        MPS_SEEN,
    ]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, cwd="/"
    )
    assert result.returncode == 0 and result.stdout.split() == [str(ROOT), str(not fails)], (
        result.stderr
    )
    assert (tmp_path / "said").is_file() != bool(fails) and (
        "no MPS here" in result.stderr
    ) == bool(fails)
    command[-1] = "raise SystemExit(7)"
    assert (
        subprocess.run(
            command, env=environment, capture_output=True, timeout=120, cwd="/"
        ).returncode
        == 7
    )
