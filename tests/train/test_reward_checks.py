"""A reward is tried before anything is sampled, and a few clips are scored again in calls of their own."""

import json
import math

import pytest
import torch

from sage_grpo.data.requests import Request
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.base import Composite
from sage_grpo.rewards.registry import REWARDS
from sage_grpo.runs.history import read_run
from sage_grpo.train import reward_checks
from sage_grpo.train.guards import TrainingError
from sage_grpo.train.reward_checks import (
    NUM_RESCORED,
    NUM_TRIALS,
    from_all_ranks,
    rescored,
    rescoring_record,
    trial_clip,
)
from sage_grpo.worlds.shapes.reward import ShapesReward

LEVELS = (10, 200, 40, 90, 130, 0, 250, 70, 160, 30)
CLIPS = [torch.full((2, 4, 4, 3), level, dtype=torch.uint8) for level in LEVELS]
REQUESTS = [Request("a wall")] * len(CLIPS)
CHANCE = torch.Generator()


class Light:
    """Scores a clip by its brightness, after `change` of the scores of a call; a second score is always sound."""

    names = ("light", "calm")

    def __init__(self, change):
        self.change = change

    def check(self, prompts):
        pass

    def score(self, clips, prompts, fps):
        light = torch.stack([clip.double().mean() / 255 for clip in clips])
        return {"light": self.change(light), "calm": light**2}


def record_of(change):
    CHANCE.manual_seed(0)
    reward = Composite({"light": Light(change)}, {"light": 2.0, "calm": 1.0}, batch_size=4)
    clips = rescored(reward, [None, *CLIPS], [REQUESTS[0], *REQUESTS], fps=8.0)
    assert len(clips) == NUM_RESCORED
    return rescoring_record(from_all_ranks(Ranks(0, 1, torch.device("cpu")), clips))


SPREAD = (
    2 * torch.tensor(LEVELS[:NUM_RESCORED]).double().std().item() / 255
)  # of the weighted score


@pytest.mark.parametrize(
    ("change", "chance", "difference", "is_sorted"),
    [
        (lambda light: light, False, False, True),
        (lambda light: light + 0.5 * torch.randn(len(light), generator=CHANCE), True, True, False),
        (lambda light: light.argsort().argsort() / 4, False, True, False),  # ranks in the call
        (lambda light: light - light.mean(), False, True, False),
        (lambda light: light.flip(0), False, True, True),
        (lambda light: light.roll(1), False, True, True),
    ],
    ids=["sound", "chance", "ranks", "centered", "reversed", "shifted"],
)
def test_what_scores_depend_on(change, chance, difference, is_sorted):
    record = record_of(change)
    assert (record["signal/rescoring"] > 0.3 * SPREAD) == chance
    assert (record["signal/call_difference"] > 0.3 * SPREAD) == difference
    assert (record["signal/call_sorted"] < 0.01 * SPREAD) == is_sorted
    assert record["signal/call_failures"] == 0
    if difference:
        assert record["signal/call_score"] == "light"


def test_a_reward_that_cannot_score_one_clip_alone():
    record = record_of(lambda light: (light - light.mean()) / light.std())  # 0 / 0 for one clip
    assert record["signal/call_failures"] == 1 and math.isnan(record["signal/rescoring"])


def test_made_up_clips_differ_and_move():
    first, second = (trial_clip(3, 8, 6, number) for number in range(2))
    assert first.shape == (3, 8, 6, 3) and first.dtype == torch.uint8
    assert not torch.equal(first, second) and not torch.equal(first[0], first[1])


class FailsAtFirst(ShapesReward):
    """Fails in its first calls."""

    def __init__(self, failures):
        self.bad_calls, self.calls = failures, 0

    def score(self, clips, prompts, fps):
        self.calls += 1
        if self.calls <= self.bad_calls:
            raise OSError("gone")
        return super().score(clips, prompts, fps)


def with_reward(make, failures, **flags):
    trainer = make(validate_at_step0=True, max_steps=1, **flags)
    reward = FailsAtFirst(failures)
    trainer.reward.rewards["shapes"] = reward
    return trainer, reward


def test_a_reward_that_always_fails_stops_the_run_before_anything_is_sampled(make, monkeypatch):
    trainer, reward = with_reward(make, math.inf)
    sampled = []
    monkeypatch.setattr(trainer.backbone, "velocity", lambda *_: sampled.append(1))
    with pytest.raises(TrainingError, match="before anything was sampled: shapes: OSError: gone"):
        trainer.train()
    assert reward.calls == NUM_TRIALS and not sampled
    status = json.loads((trainer.run.path / "status.json").read_text())
    assert status["state"] == "failed" and "rewards failed" in status["message"]


@pytest.mark.parametrize(
    ("failures", "limit"), [(1, 0.0), (NUM_TRIALS, 1.0)], ids=["once", "tolerated"]
)
def test_a_reward_that_failed_once_or_may_fail_is_trained_with(make, failures, limit, capfd):
    trainer, _ = with_reward(make, failures, max_reward_failures=limit)
    trainer.train()
    assert trainer.step == 1
    assert ("failed on a made-up clip" in capfd.readouterr().err) == (failures == NUM_TRIALS)


class RefusesPrompts(ShapesReward):
    def check(self, prompts):
        raise ValueError(f"cannot judge {len(prompts)} prompts")


def test_a_held_out_reward_that_cannot_score_the_prompts_is_refused(make, monkeypatch):
    monkeypatch.setitem(REWARDS, "refusing", lambda setup: RefusesPrompts())
    with pytest.raises(ValueError, match="cannot judge 3 prompts"):  # the held-out ones alone
        make(holdout_reward="refusing")


def with_holdout(make, **flags):
    """A trainer whose held-out reward always fails."""
    trainer = make(
        holdout_reward="shapes", validate_at_step0=True, validation_interval=1, max_steps=1, **flags
    )
    trainer.validation.holdout_reward.rewards["shapes"] = FailsAtFirst(math.inf)
    return trainer


def test_a_held_out_reward_that_decides_when_to_stop_must_work(make):
    trainer = with_holdout(make, stop_on_hacking=True)
    with pytest.raises(TrainingError, match=r"held-out reward failed .* shapes: OSError: gone"):
        trainer.train()
    assert not trainer.run.validated_steps()


def test_without_held_out_scores_it_is_not_known_whether_the_run_is_hacked(make):
    trainer = with_holdout(make)
    trainer.train()
    run = read_run(trainer.run.path)
    assert [line["holdout/diverged"] for line in run.validations] == [None, None]
    listing = trainer.run.validation_folder(1) / "clips.json"
    assert {clip["error"][:21] for clip in json.loads(listing.read_text())} == {
        "shapes: OSError: gone"
    }


def test_clips_are_scored_again_with_their_own_prompts(make, monkeypatch):
    """Also where only some of the clips are trained, and the first iteration is not logged."""
    monkeypatch.setattr(reward_checks, "NUM_RESCORED", NUM_RESCORED)
    trainer = make(max_steps=3, log_interval=2, num_generations=4, train_clips=2)
    asked = []
    score = trainer.reward.rewards["shapes"].score

    def noted(clips, prompts, fps):
        asked.extend(
            (clip.double().sum().item(), prompt)
            for clip, prompt in zip(clips, prompts, strict=True)
        )
        return score(clips, prompts, fps)

    trainer.reward.rewards["shapes"].score = noted
    trainer.validation = None
    trainer.train()
    of_training = asked[NUM_TRIALS:]
    assert (
        len(of_training) == 3 * 4 + 3 * 4
    )  # every clip once, and those of iteration 2 three more times
    again = of_training[8 : 8 + 12]
    assert set(again) == set(of_training[4:8])
    logged = read_run(trainer.run.path).full_lines
    assert [line["step"] for line in logged if "signal/rescoring" in line] == [2]
