"""Signals, dead ranks and hanging ranks under torchrun's agent: what is lost, reported and resumed."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sage_grpo.train import checkpoint_folders
from tests import elastic
from tests.smallest_run import slow

PATIENCE = 100  # seconds
LAST = 8


@pytest.fixture
def command(flags):
    """Flags of a short run on two ranks that saves often."""
    quick = {
        "use_lora": True,
        "batch_size": 2,
        "num_generations": 4,
        "num_sampling_steps": 2,
        "kl_weight": 1e-3,
    }
    words = {
        "validation_interval": 0,
        "validation_prompts": flags["train_prompts"],
        "collective_timeout": 60,
    }
    return (
        flags
        | quick
        | words
        | {"max_steps": LAST, "save_interval": 2, "resume_from_checkpoint": "auto"}
    )


@pytest.fixture(scope="module")
def unbroken():
    return {}


def start(flags, **words):
    return elastic.start(
        [word for name, value in flags.items() for word in (f"--{name}", value)], **words
    )


def until(condition, what):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE} s for {what}"
        time.sleep(0.005)


def iterations(folder):
    file = folder / "metrics.jsonl"
    return file.read_text().count('"kind": "train"') if file.is_file() else 0


def pid(folder, rank):
    return int((folder.parent / "ranks" / f"{rank}.pid").read_text())


def codes(folder):
    return [(folder.parent / "ranks" / f"{rank}.code").read_text() for rank in (0, 1)]


def status(folder):
    return json.loads((folder / "status.json").read_text())


def ended(process):
    process.join(PATIENCE)
    assert process.exitcode is not None, "the agent does not end"
    return process.exitcode


def weights(folder):
    (newest,) = [
        path
        for path in checkpoint_folders.list_checkpoints(folder / "checkpoints")
        if checkpoint_folders.step_of(path) == LAST
    ]
    return load_file(newest / "trainer" / "rank-00000.safetensors")


def same_as_unbroken(command, unbroken):
    folder = Path(command["output_dir"])
    if not unbroken:
        straight = command | {"output_dir": str(folder.with_name("unbroken")), "report_to": "none"}
        assert ended(start(straight)) == 0
        unbroken.update(weights(folder.with_name("unbroken")))
    found = weights(folder)
    return found.keys() == unbroken.keys() and all(
        torch.equal(found[name], value) for name, value in unbroken.items()
    )


MOMENTS = {
    "start": lambda folder: (folder.parent / "ranks" / "1.pid").is_file(),
    "rollout": lambda folder: iterations(folder) >= 3,
    "save": lambda folder: any((folder / "checkpoints").glob("step-*.tmp")),
}


@pytest.mark.parametrize("whom, moment", [("all", "rollout"), slow("one", "save")])
def test_sigterm_stops_all_ranks_at_one_step_with_a_checkpoint(command, unbroken, whom, moment):
    folder = Path(command["output_dir"])
    process = start(command)
    until(lambda: MOMENTS[moment](folder), moment)
    time.sleep(random.random() * 0.3 if moment == "rollout" else 0)
    os.kill(process.pid if whom == "all" else pid(folder, 1), signal.SIGTERM)
    assert ended(process) != 0
    assert codes(folder) == ["75", "75"]
    told = status(folder)
    assert told["state"] == "preempted" and 0 < told["step"] < LAST
    newest = checkpoint_folders.list_checkpoints(folder / "checkpoints")[-1]
    assert checkpoint_folders.step_of(newest) == told["step"] and iterations(folder) == told["step"]
    assert not list((folder / "checkpoints").glob("*.tmp"))
    assert ended(start(command)) == 0
    assert (status(folder)["state"], status(folder)["step"]) == ("done", LAST) and same_as_unbroken(
        command, unbroken
    )


@pytest.mark.parametrize("moment", [slow("start"), "save"])
def test_a_dead_rank_does_not_end_the_run(command, unbroken, moment):
    folder = Path(command["output_dir"])
    process = start(command, max_restarts=2)
    until(lambda: MOMENTS[moment](folder), moment)
    os.kill(pid(folder, 1), signal.SIGKILL)
    assert ended(process) == 0
    assert status(folder)["state"] == "done" and same_as_unbroken(command, unbroken)
    assert (folder / "metrics.jsonl").read_text().count('"kind": "run"') == (
        1 if moment == "start" else 2
    )


def test_a_rank_that_hangs_ends_the_run_with_evidence(command):
    folder, timeout = Path(command["output_dir"]), 3.0
    process = start(command | {"collective_timeout": timeout}, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")
    until(lambda: iterations(folder) >= 3, "iterations")
    asleep = pid(folder, 1)
    os.kill(asleep, signal.SIGSTOP)
    flight = folder / "flight" / "rank-00000.json"
    until(flight.is_file, "the flight record")
    os.kill(asleep, signal.SIGKILL)  # as an agent does after its grace
    assert ended(process) != 0
    record = json.loads(flight.read_text())
    assert record["iteration"] > 3 and record["phase"] in (
        "rollout",
        "decode",
        "reward",
        "anchor",
        "update",
        "save",
    )
    assert record["idle_seconds"] < timeout + 2
    assert f"iteration {record['iteration']}, {record['phase']}: " in record["message"]
    assert record["events"][-1][1:] == [record["iteration"] - 1, record["phase"]]
    assert any(
        "torch/distributed" in line for line in (*record["stacks"]["MainThread"], *record["error"])
    )
    assert status(folder)["state"] == "failed" and status(folder)["message"] == record["message"]


@pytest.mark.slow
def test_a_run_that_lost_its_newest_checkpoint_goes_on_from_the_one_before(command, unbroken):
    """Slow: two ranks under torchrun; tests/train/test_durability.py damages checkpoints of one."""
    folder = Path(command["output_dir"])
    assert ended(start(command)) == 0
    newest = checkpoint_folders.list_checkpoints(folder / "checkpoints")[-1]
    with (newest / "trainer" / "rank-00000.safetensors").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\x00\x01\x02")
    assert ended(start(command)) == 0
    assert '"kind": "run", "step": 6' in (folder / "metrics.jsonl").read_text()
    assert same_as_unbroken(command, unbroken)
