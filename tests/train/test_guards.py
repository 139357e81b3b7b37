"""Guards in isolation: votes, signals, hangs, status; and on two ranks, one of which fails."""

import dataclasses
import errno
import json
import math
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sage_grpo.config.fields import Config
from sage_grpo.config.parse import from_values
from sage_grpo.parallel.fsdp import local_shard
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.base import Scores
from sage_grpo.runs.folder import RunFolder
from sage_grpo.train import guards, saving
from sage_grpo.train.build import build_trainer
from sage_grpo.train.guards import Guards, Preempted, TrainingError
from sage_grpo.train.optimization import Optimization
from sage_grpo.worlds.shapes.reward import ShapesReward
from tests.dist import CONTEXT, run_ranks
from tests.smallest_run import slow


def alone(folder, timeout=600.0):
    ranks = Ranks(0, 1, torch.device("cpu"))
    return Guards(ranks, RunFolder(Config(output_dir=str(folder), overwrite=True), ranks), timeout)


def skipped(optimization):
    return optimization.skipped, optimization.skipped_in_a_row


def test_a_step_is_taken_if_it_is_finite_and_teaches_something():
    optimization = Optimization(None, {}, Config())
    assert optimization.should_step(1.0, True) and optimization.should_step(0.0, True)
    assert not optimization.should_step(1.0, False)
    assert not optimization.should_step(math.nan, True)
    assert not optimization.should_step(math.inf, True)


def test_steps_that_are_not_taken_are_counted_and_a_step_ends_the_row():
    optimization = Optimization(None, {}, Config())
    assert skipped(optimization) == (0, 0)
    optimization.count_skip(1.0)  # no advantage
    assert skipped(optimization) == (1, 0)
    optimization.count_skip(math.nan)
    optimization.count_skip(math.inf)
    assert skipped(optimization) == (3, 2)
    optimization.count_skip(1.0)
    assert skipped(optimization) == (4, 2)
    optimization.step()
    assert skipped(optimization) == (4, 0)


def test_rewards_may_fail_up_to_the_limit(make):
    scores = Scores(torch.tensor([1.0, math.nan, 2.0, math.inf]).double(), {}, ["shapes: gone"])
    trainer = make(max_reward_failures=0.5)
    trainer.reward, trainer.state.step = SimpleNamespace(score=lambda *_: scores), 2
    assert torch.equal(
        trainer.score([], []).total.isfinite(), torch.tensor([True, False, True, False])
    )
    trainer.config = dataclasses.replace(trainer.config, max_reward_failures=0.25)
    with pytest.raises(
        TrainingError,
        match=r"iteration 3: 50% .* max_reward_failures \(25%\); .* was: shapes: gone",
    ):
        trainer.score([], [])


@pytest.mark.parametrize("number", guards.SIGNALS)
def test_a_signal_is_heard_at_the_next_chance_with_a_checkpoint(tmp_path, number):
    watched, saved = alone(tmp_path), []
    words = "stopped by a signal in iteration 8, reward"
    with (
        pytest.raises(Preempted, match=words),
        watched.watching(0, lambda: saved.append(watched.phase)),
    ):
        watched.step = 7
        watched.note("reward")
        os.kill(os.getpid(), number)
        assert not saved
        watched.stop_if_told()
    assert saved == ["reward"]
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["step"]) == ("preempted", 7)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # as before


def test_nobody_is_told_to_stop_outside_of_training(tmp_path):
    watched = alone(tmp_path)
    watched.signalled = 0.0
    watched.note("rollout")
    watched.stop_if_told()


def test_a_status_is_left_however_training_ends(tmp_path):
    watched = alone(tmp_path)
    with watched.watching(0, lambda: None):
        assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"
    with pytest.raises(KeyError), watched.watching(0, lambda: None):
        watched.note("decode")
        raise KeyError("a bug")
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["message"]) == ("failed", "'a bug'")
    record = json.loads((tmp_path / "flight" / "rank-00000.json").read_text())
    assert record["phase"] == "decode" and 'KeyError("a bug")' in "".join(record["error"])


def test_no_thread_outlives_training(tmp_path):
    """One that held the last reference to the process group would destroy it while Python exits, which aborts."""
    before = set(threading.enumerate())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # another thread only runs while this one waits
    try:
        with alone(tmp_path).watching(0, lambda: None):
            assert len(set(threading.enumerate()) - before) == 1
        assert set(threading.enumerate()) <= before
    finally:
        sys.setswitchinterval(interval)


def test_ranks_that_lost_each_other_are_one_sentence(tmp_path):
    watched = alone(tmp_path)
    words = r"iteration 1, reward: a rank died or the process group failed \(.*Connection closed by peer\)$"
    with pytest.raises(TrainingError, match=words), watched.watching(0, lambda: None):
        watched.note("reward")
        raise RuntimeError(
            "[third_party/gloo/tcp/pair.cc:1] Connection closed by peer\nmore\nlines"
        )


def test_a_status_that_cannot_be_written_is_told_and_stops_nothing(tmp_path, capfd):
    watched = alone(tmp_path / "not" / "there")
    with watched.watching(0, lambda: None):
        pass
    assert capfd.readouterr().err.count("note: status.json could not be written: [Errno 2]") == 2


def signalled_twice(folder, pipe, pause):
    watched = alone(folder)
    with watched.watching(0, lambda: None):
        watched.note("update")
        pipe.send("ready")
        for _ in range(2):  # sleep goes on after a signal
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(pause)
        pipe.send("alive")


@pytest.mark.parametrize(
    "pause, heard, code", [(0.0, ["ready", "alive"], 0), (guards.ECHO + 0.1, ["ready"], 75)]
)
def test_a_second_signal_ends_at_once_and_an_echo_does_not(tmp_path, pause, heard, code):
    reader, writer = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=signalled_twice, args=(tmp_path, writer, pause))
    process.start()
    writer.close()
    process.join(60)
    told = []
    while reader.poll():
        try:
            told.append(reader.recv())
        except EOFError:
            break
    assert told == heard and process.exitcode == code


def stuck(folder):
    watched = alone(folder, timeout=1.0)
    with watched.watching(0, lambda: None):
        for _ in range(4):  # longer than the timeout, but with progress
            time.sleep(0.3)
            watched.beat()
        watched.step = 4
        watched.note("anchor")
        threading.Event().wait(600)


def record_of_failed(work, *arguments):
    """The flight record of a process that fails in `work(FOLDER, ...)`, whose message the status has as well."""
    folder = arguments[0]
    process = CONTEXT.Process(target=work, args=arguments)
    process.start()
    process.join(300)
    assert process.exitcode == guards.FAILED
    record = json.loads((folder / "flight" / "rank-00000.json").read_text())
    assert json.loads((folder / "status.json").read_text())["message"] == record["message"]
    return record


def test_a_process_in_which_nothing_moves_ends_itself(tmp_path):
    record = record_of_failed(stuck, tmp_path)
    assert (record["iteration"], record["phase"]) == (5, "anchor")
    assert record["idle_seconds"] > 1.0 and "collective_timeout" in record["message"]
    assert any("wait(600)" in line for line in record["stacks"]["MainThread"])


def torn(folder, hang_first):
    """A hang and an error, of which one comes while the other is being written."""
    watched = alone(folder, timeout=0.1)
    begun, write = threading.Event(), guards.write_json

    def the_first_slowly(*what):
        write(*what)
        if not begun.is_set():
            begun.set()
            time.sleep(0.5)

    guards.write_json = the_first_slowly
    try:
        with watched.watching(0, lambda: None):
            if hang_first:
                begun.wait(60)
            raise RuntimeError("gloo: timed out")
    finally:
        time.sleep(0.5)  # a process group takes its time to end


@pytest.mark.parametrize("hang_first, words", [(True, "no progress"), (False, "timed out")])
def test_a_hang_and_the_error_it_causes_tell_one_story(tmp_path, hang_first, words):
    assert words in record_of_failed(torn, tmp_path, hang_first)["message"]


class Broken(ShapesReward):
    """Fails for the first `bad` clips of each call, in the way that `how` says."""

    def __init__(self, how, bad):
        self.how, self.bad = how, bad

    def score(self, clips, prompts, fps):
        scores = super().score(clips, prompts, fps)
        if self.bad and self.how == "raise":
            raise OSError("gone")
        if self.bad and self.how == "hang":
            time.sleep(30)
        if self.bad and self.how == "length":
            return {name: values[1:] for name, values in scores.items()}
        return {
            name: values.index_fill(0, torch.arange(self.bad), math.nan)
            for name, values in scores.items()
        }


def on_ranks(ranks, values, **changes):
    trainer = build_trainer(
        from_values(values | {"batch_size": 4 // ranks.dp_size, **changes}), ranks
    )
    trainer.validation = None
    return trainer


def state(trainer):
    tensors = trainer.optimization.parameters | trainer.optimization.tensors()
    return {name: local_shard(value).detach().clone() for name, value in tensors.items()}


def unchanged(trainer, before):
    after = state(trainer)
    return before.keys() == after.keys() and all(
        torch.equal(after[name], value) for name, value in before.items()
    )


def train_with_reward(ranks, values, how, bad):
    """bad: how many clips fail on each rank. Returns the text of the end, the last record, if state is as before."""
    trainer = on_ranks(ranks, values, reward_batch_size=2)
    trainer.reward.rewards["shapes"], trainer.reward.timeout = Broken(how, bad[ranks.dp_rank]), 0.5
    before, end = state(trainer), ""
    try:
        trainer.train()
    except TrainingError as error:
        end = str(error)
    lines = (Path(values["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    return end, json.loads(lines[-1]), unchanged(trainer, before)


@pytest.mark.parametrize("how, bad", [
    ("raise", (0, 1)), ("nan", (0, 2)), ("raise", (2, 2)), ("length", (0, 1)), ("hang", (2, 2)),
    slow("raise", (0, 2)), slow("nan", (0, 1)), slow("nan", (2, 2)),
])  # fmt: skip
def test_a_failed_reward_is_never_a_number_on_any_rank(flags, how, bad):
    """Two ranks with half a group of four each. A call that fails takes both clips of its rank along."""
    values = flags | {
        "num_generations": 4,
        "max_steps": 1,
        "max_reward_failures": 1.0,
        "use_lora": True,
    }
    (end, record, kept), (other_end, _, other_kept) = run_ranks(
        2, train_with_reward, values | {"kl_weight": 0}, how, bad
    )
    lost = sum(bad) if how == "nan" else 2 * sum(map(bool, bad))
    assert end == other_end == "" and kept == other_kept
    assert record["reward/failed"] == lost and (record["reward/total"] is None) == (lost == 4)
    assert kept == (lost == 4) and record["policy/skipped_updates"] == (lost == 4)
    assert math.isfinite(record["policy/grad_norm"]) and record["updates"] == (lost < 4)


def test_a_reward_that_fails_on_one_rank_stops_all_of_them_before_they_sample(flags):
    values = flags | {"num_generations": 4, "max_steps": 1, "use_lora": True}
    for end, _, kept in run_ranks(2, train_with_reward, values, "raise", (0, 2)):
        assert kept and "before anything was sampled: shapes: OSError: gone (" in end


def train_with_nan(ranks, values, where, always):
    """One number of one rank is not finite, in the second iteration or from it on."""
    trainer = on_ranks(ranks, values)
    velocity, states, parameter = (
        trainer.backbone.velocity,
        [],
        next(iter(trainer.optimization.parameters.values())),
    )

    def guilty():
        return ranks.dp_rank == 1 and (trainer.step == 1 or (always and trainer.step > 1))

    def broken_velocity(x, *rest):
        v = velocity(x, *rest)
        if not guilty() or trainer.guards.phase != ("update" if where == "loss" else "rollout"):
            return v
        return torch.cat([v[:1], v[1:] * math.nan]) if where == "log_prob" else v * math.nan

    if where in ("loss", "log_prob"):
        trainer.backbone.velocity = broken_velocity
    if where == "gradient":
        parameter.register_hook(lambda gradient: gradient * math.nan if guilty() else gradient)
    step = trainer.optimizer_step

    def optimizer_step():
        before = state(trainer)
        norm = step()
        states.append(unchanged(trainer, before))
        return norm

    trainer.optimizer_step, end = optimizer_step, ""
    try:
        trainer.train()
    except TrainingError as error:
        end = str(error)
    finite = all(p.isfinite().all() for p in trainer.optimization.parameters.values())
    return end, states, skipped(trainer.optimization), finite


@pytest.mark.parametrize("where", ["loss", "gradient", "log_prob"])
def test_nan_on_one_rank_costs_all_of_them_one_step_and_no_weight(flags, where):
    values = flags | {
        "num_generations": 2,
        "max_steps": 3,
        "use_lora": True,
        "max_reward_failures": 1.0,
    }
    for end, states, vote, finite in run_ranks(2, train_with_nan, values, where, False):
        assert end == "" and finite
        if where == "log_prob":  # a broken path leaves its group; the others teach
            assert states == [False, False, False] and vote == (0, 0)
        else:
            assert states == [False, True, False] and vote == (1, 0)


def test_nan_again_and_again_stops_all_ranks_naming_prompt_and_seed(flags):
    values = flags | {"num_generations": 2, "max_steps": 20, "use_lora": True}
    (end, states, vote, finite), (other_end, *_) = run_ranks(
        2, train_with_nan, values, "loss", True
    )
    assert end == other_end and finite and states == [False] + 5 * [True] and vote == (6, 6)
    prompts = "|".join(Path(flags["train_prompts"]).read_text().splitlines())
    words = rf"6 times in a row, at last in iteration 7 at '({prompts})', clip \d with seed 42: lower learning_rate"
    assert re.search(words, end)


def test_a_signal_between_two_updates_of_a_rollout_waits_for_the_second(make):
    """The weights have begun to change: an iteration that stopped here could not be made again."""
    straight = make(max_steps=2, updates_per_rollout=2, use_lora=True)
    straight.validation = None
    straight.train()
    trainer = make(max_steps=2, updates_per_rollout=2, use_lora=True, overwrite=True)
    trainer.validation, step, steps = None, trainer.optimizer_step, []

    def optimizer_step():
        steps.append(trainer.step)
        if len(steps) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step()

    trainer.optimizer_step = optimizer_step
    with pytest.raises(Preempted, match="iteration 2, rollout"):
        trainer.train()
    assert steps == [0, 0] and trainer.saves.step == 1
    again = make(max_steps=2, updates_per_rollout=2, use_lora=True, resume_from_checkpoint="auto")
    again.validation = None
    again.train()
    assert unchanged(again, state(straight))


def test_a_signal_whose_checkpoint_cannot_be_written_is_a_failure(make, monkeypatch):
    trainer = make(max_steps=2)
    monkeypatch.setattr(saving, "write_files", full_disk)
    trainer.decode = lambda batch: os.kill(os.getpid(), signal.SIGTERM) or [None] * 4
    with pytest.raises(TrainingError, match="step-000000 could not be written: OSError"):
        trainer.train()
    assert json.loads((trainer.run.path / "status.json").read_text())["state"] == "failed"


def test_a_signal_before_the_first_update_drops_the_iteration(make):
    trainer = make(max_steps=2)
    before = state(trainer)
    trainer.decode = lambda batch: os.kill(os.getpid(), signal.SIGTERM) or [None] * 4
    with pytest.raises(Preempted, match="iteration 1, reward"):
        trainer.train()
    assert (
        unchanged(trainer, before)
        and trainer.saves.step == 0
        and make(resume_from_checkpoint="auto").step == 0
    )


def test_a_validation_that_was_cut_short_is_made_up_for(make):
    trainer = make(max_steps=2, save_interval=1, validation_interval=1)
    latents, seen = trainer.validation.latents, []

    def stop_in_second(prompt, between):
        seen.append(prompt)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return latents(prompt, between)

    trainer.validation.latents = stop_in_second
    with pytest.raises(Preempted, match="iteration 2, validation"):
        trainer.train()
    assert len(seen) == 2 and trainer.saves.step == 1 and not trainer.run.validated_steps()
    again = make(max_steps=2, save_interval=1, validation_interval=1, resume_from_checkpoint="auto")
    again.train()
    assert again.run.validated_steps() == [1, 2]
    lines = (again.run.path / "metrics.jsonl").read_text().splitlines()
    assert sum('"kind": "validation"' in line for line in lines) == 2
    idle = make(max_steps=2, validation_interval=1, resume_from_checkpoint="auto")
    idle.validation.run = None  # nothing is owed
    idle.train()


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_flight_record_that_cannot_be_written_goes_to_the_terminal(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(guards, "write_json", full_disk)
    with pytest.raises(KeyError), alone(tmp_path).watching(0, lambda: None):
        raise KeyError("a bug")
    told = capfd.readouterr().err
    assert "rank-00000.json could not be written ([Errno 28]" in told and '"phase": "start"' in told
