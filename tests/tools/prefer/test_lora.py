"""Fitting an adapter to answers: the embedded reward, and clips that are cut into patches already."""

import weakref
from pathlib import Path

import pytest
import torch

from sage_grpo.rewards.videoalign import training
from sage_grpo.rewards.videoalign.reward import VideoAlign
from sage_grpo.tools.prefer.heads import Comparisons, full_head, raw_scores
from sage_grpo.tools.prefer.lora import PATIENCE, AdapterFit, EarlyStop, LoraLearner, Recipe
from sage_grpo.tools.prefer.study import Study, StudyClip
from sage_grpo.tools.prefer.study_clips import StudyClips, write_at_once

BASE = Path(__file__).parents[3] / "assets" / "tiny" / "VideoReward"
NUM_CLIPS = 8
NUM_PAIRS = 10
RECIPE = Recipe(rank=4, epochs=3, lr=3e-3, batch=4, seed=5)


@pytest.fixture
def clips(tmp_path):
    """Clips of different brightness in the store of a study."""
    reward = VideoAlign(BASE)
    listed = tuple(StudyClip(f"{i}.mp4", 0, f"a red circle {i % 6}") for i in range(NUM_CLIPS))
    study = Study(("base",), ("vq",), listed, ((0, 1),))
    clips = StudyClips(reward, study, tmp_path / "prefs.jsonl", tmp_path, "key")
    generator = torch.Generator().manual_seed(0)
    for number in range(NUM_CLIPS):
        pixels = torch.rand(8, 48, 48, 3, generator=generator) * 30 * (number + 1)
        patches, grid = clips.cut(pixels.to(torch.uint8), 8.0, number)
        file = tmp_path / f"key-clip-{number:06d}.safetensors"
        write_at_once(file, {"patches": patches, "grid": torch.tensor(grid)})
    return clips


def compared(seed=0):
    """A rater prefers bright clips, whose numbers are high."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(NUM_CLIPS, (NUM_PAIRS,), generator=generator)
    second = (first + torch.randint(1, NUM_CLIPS, (NUM_PAIRS,), generator=generator)) % NUM_CLIPS
    shares = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).expand(NUM_PAIRS, 3)
    labels = (first - second).sign().double()
    prompts = tuple(f"prompt {i % 5}" for i in range(NUM_PAIRS))
    return Comparisons(first, second, shares, labels, prompts, ("vq",) * NUM_PAIRS)


def new_fit(clips, recipe=RECIPE):
    reward = VideoAlign(BASE)
    head = full_head(reward.head)
    scores = base_scores(reward, clips)
    return AdapterFit(reward, clips, compared(), head, scores, recipe)


@torch.no_grad()
def base_scores(reward, clips):
    hidden = reward.hidden(clips.inputs(range(NUM_CLIPS), keeps=False))
    return raw_scores(hidden, full_head(reward.head))


def values(fit):
    return [value.detach().clone() for value in fit.parameters.values()]


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_it_learns_in_the_loop_that_trains_the_embedded_reward(clips, tmp_path, monkeypatch):
    names = []
    loop = training.train
    monkeypatch.setattr(
        training,
        "train",
        lambda *args, **kwargs: names.append(kwargs["name"]) or loop(*args, **kwargs),
    )
    fit = new_fit(clips)
    before = fit.loss(fit.comparisons)
    fit.run(tmp_path / "state.safetensors", "key", epochs=3)
    assert names == ["adapter"]
    assert fit.loss(fit.comparisons) < before - 0.05
    with torch.no_grad():
        change = (fit.raw(range(NUM_CLIPS)) - fit.base_scores) / fit.spread
    asked, *others = change.square().mean(0).sqrt().tolist()
    assert max(others) < asked / 2  # MQ and TA, about which nobody was asked, are held


def test_an_epoch_has_every_comparison_once_in_an_order_of_its_own(clips):
    fit = new_fit(clips)
    assert fit.steps_per_epoch == 3
    epochs = [torch.cat([fit.draw(3 * epoch + i)[0] for i in (1, 2, 3)]) for epoch in (0, 1)]
    for rows in epochs:
        assert sorted(rows.tolist()) == list(range(NUM_PAIRS))
    assert not torch.equal(*epochs)


def test_small_backwards_and_recomputed_layers_give_the_same_gradients(clips):
    """What a large reward does to fit on a GPU."""
    found = []
    for is_large in (False, True):
        fit = new_fit(clips)
        with torch.no_grad():
            for parameter in fit.parameters.values():
                parameter += 0.01
        if is_large:
            fit.pairs_per_backward = 1
            fit.recompute_layers()
        loss = fit.gradients(torch.arange(6))
        found.append([loss, *(value.grad for value in fit.parameters.values())])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(whole, parts, atol=1e-5, rtol=1e-4)


def test_a_killed_training_continues_to_the_last_bit(clips, tmp_path):
    expected = new_fit(clips)
    expected.run(tmp_path / "whole.safetensors", "key", epochs=3)
    killed = new_fit(clips)
    gradients = killed.gradients
    steps = []

    def interrupted(rows):
        steps.append(rows)
        if len(steps) == 5:  # in the second epoch
            raise KeyboardInterrupt
        return gradients(rows)

    killed.gradients = interrupted
    file = tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        killed.run(file, "key", epochs=3)
    resumed = new_fit(clips)
    resumed.run(file, "key", epochs=3)
    assert equal(values(resumed), values(expected))


class Script:
    """A fit whose loss is known beforehand."""

    def __init__(self, losses):
        self.losses = list(losses)
        self.parameters = {"w": torch.zeros(1)}

    def loss(self, comparisons):
        return self.losses.pop(0)


def test_training_stops_when_left_out_prompts_are_no_longer_judged_better(tmp_path):
    fit = Script([0.9, 0.7, 0.8, 0.75, 0.1])
    stop = EarlyStop(fit, compared(), tmp_path, "key")
    ends = []
    for epoch in range(4):
        fit.parameters["w"].fill_(epoch)
        ends.append(stop(epoch))
    assert ends == [False, False, False, True]
    assert stop.best_epoch == 1 and PATIENCE == 2
    stop.restore_best()
    assert fit.parameters["w"] == 1

    again = EarlyStop(fit, compared(), tmp_path, "key")
    assert again.is_over and again.losses == stop.losses
    assert not EarlyStop(fit, compared(), tmp_path, "other").losses


def learner_from(clips, open_reward):
    return LoraLearner(
        open_reward=open_reward,
        clips=clips,
        first_head=lambda comparisons: full_head(VideoAlign(BASE).head),
        base_scores=base_scores(VideoAlign(BASE), clips),
        recipe=RECIPE,
        dtype=torch.float32,
        key="key",
    )


def test_only_one_model_is_in_memory_at_a_time(clips):
    models = [weakref.ref(clips.reward.model)]

    def open_reward():
        assert not any(model() for model in models), "the next model is loaded beside the last"
        reward = VideoAlign(BASE)
        models.append(weakref.ref(reward.model))
        return reward

    learner = learner_from(clips, open_reward)
    learner.judge(compared(), compared(1))
    learner.epochs = 1
    learner.final(compared())
    assert len(models) == 3


def test_what_is_judged_and_what_is_written_come_from_the_base_each_time(clips):
    def learner():
        return learner_from(clips, lambda: VideoAlign(BASE))

    first = learner()
    scores = first.judge(compared(), compared(1))
    assert 0 in first.losses and first.epochs == min(first.losses, key=first.losses.get)
    first.epochs = 2
    model, head = first.final(compared())
    assert not any(".lora_" in name for name in model.state_dict())

    second = learner()  # a second call, which finds all states
    assert torch.equal(second.judge(compared(), compared(1)), scores)
    second.epochs = 2
    model_again, head_again = second.final(compared())
    assert torch.equal(head, head_again)
    assert equal(model.state_dict().values(), model_again.state_dict().values())
