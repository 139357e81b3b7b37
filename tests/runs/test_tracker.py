"""What reaches metrics.jsonl, TensorBoard and wandb, including on a full disk."""

import json
import math
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sage_grpo.runs.tracker import Tracker
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
