"""The script of due measurements with a Python that only notes its calls: what runs, beside what, on how many cores."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "research" / "benchmarks" / "due.sh"
# Its folder tells it what to do: fail in a rehearsal, or write until it is killed.
PYTHON = """#!/usr/bin/env bash
here=$(dirname "$0")
echo "threads=${OMP_NUM_THREADS:-all} $*" >> "$here/calls"
case "$*" in
  *--rehearse* | *"-tiny "*)
    [[ ! -e $here/broken ]] || { until [[ -e $here/writing ]]; do sleep 0.01; done; exit 3; } ;;
  *--write_only* | *-partial)
    touch "$here/writing"
    [[ ! -e $here/broken ]] || sleep 60
    [[ $* == *--write_only ]] || mkdir "${@: -1}"
    echo "written" >> "$here/calls" ;;
esac
for word in "$@"; do if [[ $word == *.md ]]; then touch "$word"; fi; done
"""
DF = """#!/usr/bin/env bash
echo "Avail"
echo "$FREE_GB"
"""


@pytest.fixture
def due(tmp_path):
    """Runs a part; returns its exit code and the calls of Python."""
    for name, text in (("python", PYTHON), ("df", DF)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(part, **environment):
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHON": str(tmp_path / "python"),
            "OMP_NUM_THREADS": "1",
            "FREE_GB": "100",
            "MODEL": str(tmp_path / "model"),
            "COMMIT": "abc",
            **environment,
        }
        command = ["bash", str(SCRIPT), part, str(tmp_path / "output"), "30"]
        code = subprocess.run(command, env=environment, capture_output=True, timeout=50).returncode
        file = tmp_path / "calls"
        return code, file.read_text().splitlines() if file.is_file() else []

    return run


@pytest.mark.parametrize("part", ["clips", "wan", "ti2v", "a14b", "people", "images"])
def test_weights_are_there_when_a_part_at_full_size_begins(due, part):
    code, calls = due(part, SCRATCH="/tmp/somewhere")
    assert code == 0
    *before, last = calls
    assert "rehearse" not in last and "-tiny" not in last and last.endswith((".md", "recipe"))
    assert ("written" in before) == (part != "images")
    assert any("rehears" in call for call in before)
    # whatever the caller's environment says
    assert all(call.startswith("threads=all") for call in calls if call != "written")


def test_runs_that_share_a_gpu_have_a_core_each(due, tmp_path):
    code, calls = due("beyond", RUNS=str(tmp_path))
    assert code == 0
    assert [call.split()[0] for call in calls] == ["threads=1"] * 4


@pytest.mark.parametrize("part", ["clips", "a14b"])
def test_a_rehearsal_that_fails_ends_the_writing(due, part, tmp_path):
    (tmp_path / "broken").touch()
    code, calls = due(part, SCRATCH="/tmp/somewhere")
    assert code == 1
    assert "written" not in calls and len(calls) == 2  # the rehearsal and the writing
    assert not (tmp_path / "model").exists()


def test_a_rehearsal_alone_writes_nothing(due):
    code, calls = due("a14b", REHEARSE="1")
    assert code == 0
    assert len(calls) == 1 and "--rehearse" in calls[0]


@pytest.mark.parametrize("free, folder", [("70", "/dev/shm"), ("69", "/tmp")])
def test_weights_go_to_memory_if_it_has_room(due, free, folder):
    _, calls = due("a14b", FREE_GB=free)
    [writing] = [call for call in calls if call.endswith("--write_only")]
    assert f"--scratch {folder}/random_wan " in writing
