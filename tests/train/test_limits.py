"""What samples can reach at best: measured once per start, after the first iteration."""

import json

import pytest

from sage_grpo.runs.history import read_run
from sage_grpo.train.limits import perfect_scores
from sage_grpo.worlds.shapes.reward import ShapesReward
from sage_grpo.worlds.shapes.world import ShapesWorld
from tests.smallest_run import write_trivial_model


@pytest.fixture
def world_model(quick, tmp_path):
    """The trivial model, of the world of shapes."""
    model = write_trivial_model(tmp_path / "model")
    (model / "world.json").write_text('{"world": "shapes"}')
    return str(model)


def kinds(trainer):
    lines = (trainer.run.path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["kind"] for line in lines]


def test_the_goal_is_the_reward_of_clips_that_show_what_the_prompts_say(make):
    trainer = make()
    requests = trainer.validation.requests
    perfect = perfect_scores(ShapesWorld(), trainer.reward, requests, trainer.config)
    texts = [request.text for request in requests]
    clips = ShapesWorld().draw(texts, 5, 16, 16, trainer.config.seed)
    found = ShapesReward().score(clips, texts, 8.0)
    assert {name: value.mean().item() for name, value in found.items()} == pytest.approx(
        {name: perfect[name] for name in found}
    )
    weights = trainer.config.reward_weights
    assert perfect["total"] == pytest.approx(sum(weights[name] * perfect[name] for name in weights))
    trainer.run.close()


def test_limits_are_measured_after_the_first_iteration_of_a_start(make, world_model, monkeypatch):
    floors = []
    plain = ShapesWorld.vae_floor
    monkeypatch.setattr(
        ShapesWorld, "vae_floor", lambda *args: floors.append(plain(*args)) or floors[-1]
    )
    flags = {"pretrained_model_root": world_model, "save_interval": 1}
    trainer = make(**flags)
    assert kinds(trainer) == ["run"] and not floors
    assert "perfect" not in read_run(trainer.run.path).head

    trainer.train()
    assert kinds(trainer) == ["run", "train", "limits", "train", "validation"]
    head = read_run(trainer.run.path).head
    assert [head["vae_floor"]] == floors
    assert head["perfect"].keys() == {"VQ", "MQ", "TA", "total"} and head["world"] == "shapes"

    # a start without an iteration keeps what is known; one with another yardstick measures again
    make(**flags, resume_from_checkpoint="auto").train()
    assert read_run(trainer.run.path).head["perfect"] == head["perfect"]
    doubled = {"VQ": 2.0, "MQ": 2.0, "TA": 2.0}
    other = make(**flags, resume_from_checkpoint="auto", max_steps=3, reward_weights=doubled)
    assert "perfect" not in read_run(trainer.run.path).head
    other.train()
    scores = read_run(trainer.run.path).head["perfect"]
    assert scores["total"] == pytest.approx(2 * (scores["VQ"] + scores["MQ"] + scores["TA"]))


def test_a_world_that_cannot_be_measured_does_not_stop_a_run(
    make, world_model, monkeypatch, capsys
):
    def broken(*args):
        raise ArithmeticError("no floor")

    monkeypatch.setattr(ShapesWorld, "vae_floor", broken)
    trainer = make(pretrained_model_root=world_model)
    trainer.train()
    assert trainer.step == 2 and "limits" not in kinds(trainer)
    assert "no floor" in capsys.readouterr().err
