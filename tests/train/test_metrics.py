"""Sums by denoising step, and what reaches the file and TensorBoard."""

import json
import math
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sage_grpo.algo.grpo import policy_stats
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.train.metrics import SUMS, Tracker, UpdateStats, has_line
from tests.disks import fill, small_disk


class Other(Ranks):
    """As if a second rank had seen the same pairs, with ratios that deviate by 1 % at most."""

    def sum(self, values):
        return 2 * values

    def max(self, values):
        return values.clamp(min=0.01)


def filled() -> UpdateStats:
    """Three pairs: two at step 0, one at step 2 of 3."""
    steps, values = torch.tensor([0, 2, 0]), torch.tensor([1.0, 5.0, 3.0])
    stats = UpdateStats.empty(3, torch.device("cpu"))
    stats.add(steps, {name: values * (i + 1) for i, name in enumerate(SUMS[1:])})
    log_ratio = torch.tensor([0.5, 0.0, -0.1]).double()
    return UpdateStats(stats.policy + policy_stats(log_ratio, values, steps, 3, 0.2), stats.sums)


def test_means_are_over_pairs_and_by_step():
    stats = filled()
    assert stats.mean("loss") == pytest.approx(3.0) and stats.mean("kl_anchor") == pytest.approx(9.0)
    record = stats.record()
    assert record["policy/objective"] == pytest.approx(6.0) and record["kl/rollout"] == pytest.approx(12.0)
    assert record["per_step"]["count"] == [2, 0, 1]
    grad_v = record["per_step"]["grad_v"]
    assert grad_v[0] == pytest.approx(10.0) and math.isnan(grad_v[1]) and grad_v[2] == pytest.approx(25.0)


def test_parts_and_ranks_add_up_but_the_largest_deviation_stays_the_largest():
    once, twice, over = filled(), filled() + filled(), filled().over(Other(0, 2, torch.device("cpu")))
    for more in (twice, over):
        assert more.record()["per_step"]["count"] == [4, 0, 2]
        assert more.mean("loss") == pytest.approx(once.mean("loss"))
        assert more.policy.max_deviation[0] == once.policy.max_deviation[0] == pytest.approx(math.expm1(0.5))
    assert over.policy.max_deviation.tolist()[1:] == [0.01, 0.01]


def test_numbers_reach_the_trackers_by_kind_and_words_only_the_file(tmp_path):
    tracker = Tracker(tmp_path, ["tensorboard"], {}, 0)
    words = {"reward/error": "gone", "kl/anchor": math.nan, "step_count": 3}
    tracker.write("run", 0, {"a/b": 1.0})
    tracker.write("train", 1, {"reward/total": 0.5} | words)
    tracker.write("validation", 1, {"reward/total": 0.75})
    tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[1] == {"kind": "train", "step": 1, "reward/total": 0.5} | words | {"kl/anchor": None}
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found == {"reward/total": [(1, 0.5)], "validation/reward/total": [(1, 0.75)]}


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
        assert [json.loads(line)["step"] for line in tracker.file.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_line_is_found_by_kind_and_step(tmp_path):
    Tracker(tmp_path, ["none"], {}, 0).write("validation", 12, {})
    file = tmp_path / "metrics.jsonl"
    found = [has_line(file, kind, step) for kind, step in (("validation", 12), ("validation", 1), ("train", 12))]
    assert found == [True, False, False] and not has_line(tmp_path / "none.jsonl", "train", 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_tensorboard_goes_on_after_an_error_of_the_disk(tmp_path, capfd):
    tracker = Tracker(tmp_path, ["tensorboard"], {}, 0)
    tracker.write("train", 1, {"reward/total": 0.5})
    first, step = tracker.board, 1
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
    assert tracker.waiting
    away.rename(run)
    tracker.write("train", 2, {"reward/total": 0.25})
    tracker.close()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward/total")] == [2]


def test_a_resumed_run_goes_on_under_its_name_at_wandb(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **words: calls.append(words)))
    for folder in ("one", "one", "two"):
        (tmp_path / folder).mkdir(exist_ok=True)
        Tracker(tmp_path / folder, ["wandb"], {"eta": 0.5}, 0)
    first, resumed, other = (words["id"] for words in calls)
    assert first == resumed != other and all(words["resume"] == "allow" for words in calls)
