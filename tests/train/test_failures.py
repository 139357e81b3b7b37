"""A reward that fails in training: statistics, stopping, and nothing that turns into a number."""

import json
import math
import time

import pytest
import torch

from sage_grpo.rewards.shapes import ShapesReward
from sage_grpo.train.trainer import TrainingError


class Broken(ShapesReward):
    """Fails for the clips whose numbers are in `bad`, counted over the run, in the way that `how` says."""

    def __init__(self, how, bad):
        self.how, self.bad, self.seen = how, set(bad), 0

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
        return {name: values.index_fill(0, torch.tensor(hit), math.nan) for name, values in scores.items()}


def with_reward(make, how, bad, **flags):
    trainer = make(reward_batch_size=1, **flags)
    trainer.validation = None
    trainer.reward.rewards["shapes"] = Broken(how, bad)
    trainer.reward.timeout = 0.5
    return trainer


def lines(trainer):
    return [json.loads(line) for line in (trainer.run.folder / "metrics.jsonl").read_text().splitlines()][1:]


@pytest.mark.parametrize("how", ["raise", "nan", "length"])
def test_one_failed_reward_leaves_its_group_without_a_gradient(make, how):
    trainer = with_reward(make, how, [1], max_steps=1, kl_weight=0)  # clip 1 of 4: its group of two has one left
    trainer.train()
    (record,) = lines(trainer)
    assert record["reward/failed"] == 1 and record["reward/starved_groups"] == 1
    assert record["updates"] == 1 and math.isfinite(record["reward/total"])


def test_a_reward_that_hangs_stops_the_run_by_its_text(make):
    trainer = with_reward(make, "hang", [0])
    with pytest.raises(TrainingError, match=r"iteration 1: 100% of the rewards failed.*no answer within 0.5 s"):
        trainer.train()


@pytest.mark.parametrize("how, words", [("raise", "OSError: the reward server is gone"), ("nan", "not finite")])
def test_too_many_failures_stop_the_run_with_the_first_error(make, how, words):
    trainer = with_reward(make, how, [0, 1])
    before = {name: p.detach().clone() for name, p in trainer.optimization.parameters.items()}
    with pytest.raises(TrainingError, match=rf"50% of the rewards failed, more than max_reward_failures \(25%\).*{words}"):
        trainer.train()
    assert all(torch.equal(before[name], p) for name, p in trainer.optimization.parameters.items())


def test_no_reward_left_means_no_update_and_is_counted(make):
    trainer = with_reward(make, "nan", [0, 1, 2, 3], max_steps=2, max_reward_failures=1.0)
    before = {name: p.detach().clone() for name, p in trainer.optimization.parameters.items()}
    trainer.train()
    first, second = lines(trainer)
    assert first["policy/skipped_updates"] == 1 and first["updates"] == 0 and first["reward/total"] is None
    assert second["policy/skipped_updates"] == 1 and second["updates"] == 1
    assert any(not torch.equal(before[name], p) for name, p in trainer.optimization.parameters.items())
    assert trainer.controller.step == 1  # the KL controller counts optimizer steps, not iterations


def test_broken_latents_are_a_failed_reward(make, monkeypatch):
    trainer = make(max_steps=1, kl_weight=0)
    trainer.validation = None
    velocity = trainer.policy.velocity

    def explode(x, *rest):
        v = velocity(x, *rest)
        return torch.cat([v[:1] * math.nan, v[1:]]) if not torch.is_grad_enabled() and broken else v

    broken = True
    monkeypatch.setattr(trainer.policy, "velocity", explode)
    batch = trainer.roll_out(trainer.schedule())
    broken = False
    assert [trajectory.sound.tolist() for trajectory in batch] == [[False, True], [False, True]]
    assert all(trajectory.x.isfinite().all() for trajectory in batch)
    assert [clip is None for clip in trainer.decode(batch)] == [True, False, True, False]


def test_gradients_that_are_not_finite_never_reach_the_weights(make, monkeypatch):
    trainer = make(max_steps=20)
    trainer.validation = None
    monkeypatch.setattr(trainer.optimization, "clip", lambda: math.nan)
    before = {name: p.detach().clone() for name, p in trainer.optimization.parameters.items()}
    with pytest.raises(TrainingError, match="not finite 6 times in a row"):
        trainer.train()
    assert all(torch.equal(before[name], p) for name, p in trainer.optimization.parameters.items())
