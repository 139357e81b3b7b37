"""A reward that fails in training: statistics, stopping, and that failures never become numbers."""

import errno
import json
import math
import time
from html import unescape

import pytest
import torch

from sage_grpo.parallel.ranks import Ranks
from sage_grpo.runs.history import read_run
from sage_grpo.tools.report.page import page
from sage_grpo.train import saving
from sage_grpo.train.clips import decoded
from sage_grpo.train.guards import Preempted, TrainingError
from sage_grpo.train.reward_checks import NUM_TRIALS
from sage_grpo.worlds.shapes.reward import ShapesReward
from tests.smallest_run import on_tiny


class Broken(ShapesReward):
    """Fails for the clips whose numbers are in `bad`, counted over the run, in the way that `how` says."""

    def __init__(self, how, bad):
        self.how, self.bad = how, set(bad)
        self.seen = -NUM_TRIALS  # clips are scored before the first iteration

    def score(self, clips, prompts, fps):
        scores = super().score(clips, prompts, fps)
        numbers = range(self.seen, self.seen + len(clips))
        self.seen += len(clips)
        hit = [i for i, number in enumerate(numbers) if number in self.bad]
        if not hit:
            return scores
        if self.how == "raise":
            raise OSError("the reward server is gone")
        if self.how == "hang":
            time.sleep(20)
        if self.how == "length":
            return {name: values[1:] for name, values in scores.items()}
        return {
            name: values.index_fill(0, torch.tensor(hit), math.nan)
            for name, values in scores.items()
        }


def with_reward(make, how, bad, **flags):
    trainer = make(reward_batch_size=1, **flags)
    trainer.validation = None
    trainer.reward.rewards["shapes"] = Broken(how, bad)
    trainer.reward.timeout = 0.5
    return trainer


def lines(trainer):
    return [
        json.loads(line) for line in (trainer.run.path / "metrics.jsonl").read_text().splitlines()
    ][1:]


@pytest.mark.parametrize("how", ["raise", "nan", "length"])
def test_one_failed_reward_leaves_its_group_without_a_gradient(make, how):
    trainer = with_reward(
        make, how, [1], max_steps=1, kl_weight=0
    )  # clip 1 of 4: its group of two has one left
    trainer.train()
    (record,) = lines(trainer)
    assert record["reward/failed"] == 1 and record["reward/starved_groups"] == 1
    assert record["updates"] == 1 and math.isfinite(record["reward/total"])


@pytest.mark.parametrize(
    "how, words",
    [
        ("raise", "shapes: OSError: the reward server is gone"),
        ("nan", "1 score(s) are not finite"),
        ("length", "shapes: ValueError: VQ has shape (0,) for 1 clips"),
    ],
)
def test_a_failure_that_is_tolerated_keeps_its_words(make, how, words):
    trainer = with_reward(make, how, [1])
    trainer.train()
    failed, good = lines(trainer)
    error, _, place = failed["reward/error"].partition(" (tests/")
    assert error == words and "reward/error" not in good
    assert bool(place) == (how == "raise")


def test_the_report_quotes_the_first_failure(undrawn, make):
    trainer = with_reward(make, "raise", [1], report_to="tensorboard")  # which takes numbers alone
    trainer.train()
    trainer.run.close()
    run = read_run(trainer.run.path)
    assert run.scores == ["VQ", "MQ", "TA"]
    assert "shapes: OSError: the reward server is gone" in unescape(page(run))


def test_a_clip_that_was_not_decoded_is_the_error(make):
    trainer = make()
    batch = trainer.roll_out()
    clips = trainer.decode(batch)
    assert trainer.score(batch, clips).errors == []
    assert trainer.score(batch, [None, *clips[1:]]).errors == [
        "a clip could not be decoded: its numbers are not finite"
    ]


class SecondFails(Ranks):
    """As if a second rank had scored as many clips, and failed for the first of them."""

    def gather(self, values):
        return torch.cat([values, values.index_fill(0, torch.tensor([0]), math.nan)])

    def texts(self, mine):
        return [mine, "shapes: OSError: gone"]


def test_the_error_of_another_rank_is_kept(make):
    trainer = make()
    batch = trainer.roll_out()
    trainer.ranks = SecondFails(0, 2, trainer.ranks.device)
    scores = trainer.score(batch, trainer.decode(batch))
    assert scores.total.isnan().tolist() == [False] * 4 + [True] + [False] * 3
    assert scores.errors == ["shapes: OSError: gone"]


class SecondMeasures(Ranks):
    """As if a second rank had measured gold on clips of its own."""

    def gather(self, values):
        return torch.cat([values, torch.full_like(values, 0.5)])

    def texts(self, mine):
        return [mine, "match distance"]


def test_a_rank_without_clips_takes_part_in_measuring_gold(make):
    trainer = make()
    batch = trainer.roll_out()
    trainer.ranks = SecondMeasures(0, 2, trainer.ranks.device)
    assert trainer.measure_gold(batch, [None] * 4) == {"gold/match": 0.5, "gold/distance": 0.5}


def test_a_reward_that_hangs_stops_the_run_by_its_text(make):
    trainer = with_reward(make, "hang", [0])
    with pytest.raises(
        TrainingError, match=r"iteration 1: 100% of the rewards failed.*no answer within 0.5 s"
    ):
        trainer.train()


@pytest.mark.parametrize(
    "how, words", [("raise", "OSError: the reward server is gone"), ("nan", "not finite")]
)
def test_too_many_failures_stop_the_run_with_the_first_error(make, how, words):
    trainer = with_reward(make, how, [0, 1])
    before = {name: p.detach().clone() for name, p in trainer.optimization.parameters.items()}
    with pytest.raises(
        TrainingError,
        match=rf"50% of the rewards failed, more than max_reward_failures \(25%\).*{words}",
    ):
        trainer.train()
    assert all(torch.equal(before[name], p) for name, p in trainer.optimization.parameters.items())


def test_no_reward_left_means_no_update_and_is_counted(make):
    trainer = with_reward(make, "nan", [0, 1, 2, 3], max_steps=2, max_reward_failures=1.0)
    before = {name: p.detach().clone() for name, p in trainer.optimization.parameters.items()}
    trainer.train()
    first, second = lines(trainer)
    assert (
        first["policy/skipped_updates"] == 1
        and first["updates"] == 0
        and first["reward/total"] is None
    )
    assert second["policy/skipped_updates"] == 1 and second["updates"] == 1
    assert any(
        not torch.equal(before[name], p) for name, p in trainer.optimization.parameters.items()
    )
    assert trainer.controller.step == 1  # the KL controller counts optimizer steps, not iterations


def test_broken_latents_are_a_failed_reward(make, monkeypatch):
    trainer = make(max_steps=1, kl_weight=0)
    trainer.validation = None
    velocity = trainer.backbone.velocity

    def explode(x, *rest):
        v = velocity(x, *rest)
        return torch.cat([v[:1] * math.nan, v[1:]]) if not torch.is_grad_enabled() and broken else v

    broken = True
    monkeypatch.setattr(trainer.backbone, "velocity", explode)
    batch = trainer.roll_out()
    broken = False
    assert [trajectory.is_finite.tolist() for trajectory in batch] == [[False, True], [False, True]]
    assert all(trajectory.data.x.isfinite().all() for trajectory in batch)
    assert [clip is None for clip in trainer.decode(batch)] == [True, False, True, False]


@on_tiny
def test_broken_pixels_are_lost_alone(make):
    trainer = make()
    batch = trainer.roll_out()
    alone = [
        clip for trajectory in batch for clip in trainer.backbone.decode(trajectory.data.latents)
    ]
    batch[0].data.latents[1, 0, 0, 0, 0] = math.nan
    clips = trainer.decode(batch)
    assert [clip is None for clip in clips] == [False, True, False, False]
    assert all(
        (clips[i].int() - alone[i].int()).abs().max() <= 1 for i in (0, 2, 3)
    )  # alone, a pixel may round over


def test_a_clip_does_not_carry_the_others_along(make):
    """Ranks send clips to each other, and what is pickled is a tensor's whole storage."""
    trainer = make()
    clips = trainer.decode(trainer.roll_out())
    assert len(clips) == 4 and all(clip.untyped_storage().nbytes() == clip.nbytes for clip in clips)


@on_tiny
def test_an_error_of_the_decoder_is_no_broken_clip(make):
    trainer = make()
    batch = trainer.roll_out()

    def refuse(*_):
        raise ValueError("no kernel for this size")

    trainer.backbone.vae.decoder.register_forward_pre_hook(refuse)
    with pytest.raises(ValueError, match="no kernel"):
        trainer.decode(batch)
    with pytest.raises(ValueError, match="no kernel"):
        decoded(trainer.backbone, [batch[0].data.latents[:1]])
    with pytest.raises(ValueError, match="no kernel"):
        trainer.validation.sample(trainer.validation.requests[0])


def test_gradients_that_are_not_finite_never_reach_the_weights(make):
    trainer = make(max_steps=20)
    trainer.validation = None
    next(iter(trainer.optimization.parameters.values())).register_hook(
        lambda gradient: gradient * math.nan
    )
    before = {name: p.detach().clone() for name, p in trainer.optimization.parameters.items()}
    with pytest.raises(TrainingError, match="not finite 6 times in a row"):
        trainer.train()
    assert all(torch.equal(before[name], p) for name, p in trainer.optimization.parameters.items())
    assert trainer.optimization.updates == 0 and trainer.optimization.skipped == 6


def test_one_gradient_that_is_not_finite_costs_one_update(make):
    trainer, calls = make(max_steps=3), []
    trainer.validation = None

    def break_second_iteration(gradient):
        calls.append(trainer.step)
        return gradient * math.nan if trainer.step == 1 else gradient

    next(iter(trainer.optimization.parameters.values())).register_hook(break_second_iteration)
    trainer.train()
    assert set(calls) == {0, 1, 2} and trainer.optimization.skipped_in_a_row == 0
    assert [(line["updates"], line["policy/skipped_updates"]) for line in lines(trainer)] == [
        (1, 0),
        (1, 1),
        (2, 1),
    ]
    assert all(p.isfinite().all() for p in trainer.optimization.parameters.values())


def status(trainer):
    return json.loads((trainer.run.path / "status.json").read_text())


def test_a_signal_whose_checkpoint_cannot_be_written_is_a_failure(make, monkeypatch):
    trainer = make()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saving, "write_files", full)
    trainer.guards.signalled = 0.0  # as if a signal had come
    with pytest.raises(TrainingError, match="No space left"):
        trainer.train()
    assert status(trainer)["state"] == "failed" and "No space left" in status(trainer)["message"]
    assert (trainer.run.path / "flight" / "rank-00000.json").is_file()


def test_the_status_of_a_resumed_run_tells_where_it_goes_on(make, monkeypatch):
    make(max_steps=2).train()
    resumed, seen = make(max_steps=3, resume_from_checkpoint="auto"), []
    monkeypatch.setattr(resumed, "catch_up", lambda: seen.append(status(resumed)))
    resumed.guards.signalled = 0.0
    with pytest.raises(Preempted, match="stopped by a signal in iteration 3, rollout"):
        resumed.train()
    assert seen[0]["state"] == "running" and seen[0]["step"] == 2


def test_a_validation_that_cannot_be_written_is_told_and_counted(make, capfd):
    trainer = make(holdout_reward="shapes", validation_interval=1)
    (trainer.run.path / "validation").write_text("in the way")
    trainer.train()
    assert "note: a validation could not be written" in capfd.readouterr().err
    run = read_run(trainer.run.path)
    assert [line["step"] for line in run.validations] == [1, 2] and run.validations[1]["count"] == 3
    assert math.isfinite(run.validations[1]["reward/total"]) and status(trainer)["state"] == "done"
