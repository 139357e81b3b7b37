"""What reaches metrics.jsonl, TensorBoard and wandb, including on a full disk."""

import json
import math
import shutil
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.runs.folder import RunFolder
from sage_grpo.runs.tracker import Tracker, check_login
from tests.disks import fill, small_disk


def test_numbers_reach_the_trackers_by_kind_and_words_only_the_file(tmp_path):
    tracker = Tracker(tmp_path, ["tensorboard"], {}, 0)
    words = {"reward/error": "gone", "kl/anchor": math.nan}
    tracker.write("run", 0, {"a/b": 1.0})
    tracker.write("train", 1, {"reward/total": 0.5, "lr": 0.25} | words)
    tracker.write("validation", 1, {"reward/total": 0.75})
    tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[1] == {
        "kind": "train",
        "step": 1,
        "reward/total": 0.5,
        "lr": 0.25,
        "reward/error": "gone",
        "kl/anchor": None,
    }
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    assert found == {
        "reward/total": [(1, 0.5)],
        "lr": [(1, 0.25)],
        "validation/reward/total": [(1, 0.75)],
    }


def test_lines_wait_for_room_on_a_full_disk(tmp_path, capfd):
    with small_disk(tmp_path / "disk", megabytes=1):
        tracker = Tracker(tmp_path / "disk", ["none"], {}, 0)
        tracker.write("train", 1, {"updates": 1})
        first = tracker.file.read_text()
        fill(tmp_path / "disk" / "filler")
        for step in (2, 3):
            tracker.write("train", step, {"text": "x" * 10_000})
            assert tracker.file.read_text() == first
        assert capfd.readouterr().err.count("metrics.jsonl could not be written ([Errno 28]") == 2
        (tmp_path / "disk" / "filler").unlink()
        tracker.write("train", 4, {})
        assert [json.loads(line)["step"] for line in tracker.file.read_text().splitlines()] == [
            1,
            2,
            3,
            4,
        ]


# of TensorBoard's own thread
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_goes_on_after_an_error_of_the_disk(tmp_path, capfd):
    tracker = Tracker(tmp_path, ["tensorboard"], {}, 0)
    tracker.write("train", 1, {"reward/total": 0.5})
    first = tracker.board
    step = 1
    tracker.board.flush()
    shutil.rmtree(tmp_path / "tensorboard")
    while tracker.board is first:  # its writer works in a thread, ten lines at a time
        step += 1
        tracker.write("train", step, {"reward/total": 0.5})
        time.sleep(0.01)
        assert step < 1000
    tracker.close()
    assert "tensorboard could not be written" in capfd.readouterr().err
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/total")] == [(step, 0.5)]


def test_tensorboard_waits_as_long_as_the_lines_do(tmp_path):
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    tracker = Tracker(run, ["tensorboard"], {}, 0)
    tracker.board.flush()
    run.rename(away)  # nothing can be written, as on a full disk
    tracker.write("train", 1, {"reward/total": 0.5})
    assert tracker.buffer
    away.rename(run)
    tracker.write("train", 2, {"reward/total": 0.25})
    tracker.close()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward/total")] == [2]


def test_a_resumed_run_goes_on_under_its_name_at_wandb(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(init=lambda **kwargs: calls.append(kwargs))
    )
    for folder in ("one", "one", "two"):
        (tmp_path / folder).mkdir(exist_ok=True)
        Tracker(tmp_path / folder, ["wandb"], {"eta": 0.5}, 0)
    first, resumed, other = (kwargs["id"] for kwargs in calls)
    assert first == resumed != other and all(kwargs["resume"] == "allow" for kwargs in calls)


def test_the_name_at_wandb_is_not_written_through_a_link(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **kwargs: None))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb_id").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="wandb_id is a link"):
        Tracker(tmp_path / "run", ["wandb"], {}, 0)
    assert not (tmp_path / "elsewhere").exists()


WANDB = """
class Run:
    def log(self, *arguments, **keywords):
        {log}

    def finish(self):
        {finish}

def login():
    {login}

def init(**keywords):
    {init}
    return Run()

class Image:
    def __init__(self, image):
        {image}
"""


@pytest.fixture
def wandb_that(tmp_path, monkeypatch):
    """wandb_that(part="statement", ...): a package wandb of which these parts do so."""

    def install(**parts):
        body = dict.fromkeys(("log", "finish", "login", "init", "image"), "pass") | parts
        (tmp_path / "packages").mkdir()
        (tmp_path / "packages" / "wandb.py").write_text(WANDB.format(**body))
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))
        monkeypatch.delitem(sys.modules, "wandb", raising=False)

    yield install
    sys.modules.pop("wandb", None)


@pytest.mark.parametrize("part", ["log", "image", "finish"])
def test_a_wandb_that_breaks_down_is_noted_once_and_left_out(tmp_path, wandb_that, capfd, part):
    wandb_that(**{part: 'raise RuntimeError("broken pipe")'})
    tracker = Tracker(tmp_path, ["wandb"], {}, 0)
    for step in (1, 2):
        tracker.write("train", step, {"reward/total": 0.5})
        tracker.show("clips", np.zeros((2, 2, 3), np.uint8), step)
    tracker.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert capfd.readouterr().err.count("goes on without it (broken pipe)") == 1


def test_a_wandb_that_does_not_begin_is_refused_at_the_start_and_left_out_on_resume(
    tmp_path, wandb_that, capfd
):
    wandb_that(init='raise RuntimeError("api_key not configured")')
    with pytest.raises(ConfigError, match=r"api_key not configured.*wandb login.*--report_to"):
        Tracker(tmp_path, ["wandb"], {}, 0)
    Tracker(tmp_path, ["wandb"], {}, 4).write("train", 5, {"reward/total": 0.5})
    assert "goes on without it (api_key not configured)" in capfd.readouterr().err


def test_a_wandb_without_a_key_is_refused_before_anything_is_loaded(tmp_path, wandb_that):
    wandb_that(login='raise RuntimeError("api_key not configured")')
    config = Config(output_dir=str(tmp_path / "run"), report_to=("wandb",))
    with pytest.raises(ConfigError, match=r"api_key not configured.*wandb login.*--report_to"):
        RunFolder(config, Ranks(0, 1, torch.device("cpu"))).take()
    check_login(["tensorboard"])


def test_a_tensorboard_that_breaks_down_is_noted_once_and_left_out(tmp_path, monkeypatch, capfd):
    tracker = Tracker(tmp_path, ["tensorboard"], {}, 0)

    def fail(*arguments):
        raise TypeError("no such scalar")

    board = tracker.board
    monkeypatch.setattr(board, "add_scalar", fail)
    for step in (1, 2):
        tracker.write("train", step, {"reward/total": 0.5})
    tracker.close()
    board.close()  # its thread may not have written its first line yet, and the folder is removed after the test
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert capfd.readouterr().err.count("goes on without it (no such scalar)") == 1
