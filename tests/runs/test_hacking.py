"""Reward hacking is detected in real miniature runs, without false alarms."""

import json

import pytest
import torch

import post_train
from sage_grpo.files.json_files import write_json
from sage_grpo.intervals import Interval
from sage_grpo.rewards.registry import REWARDS
from sage_grpo.runs.clips import read_clips
from sage_grpo.runs.hacking import change, divergence
from sage_grpo.runs.history import read_run
from sage_grpo.tools.paired import drift
from sage_grpo.tools.report.page import hacking_verdict, page
from tests.smallest_run import command_line


class Bright:
    """How light a clip is, times `sign`."""

    names = ("light",)

    def __init__(self, sign):
        self.sign = sign

    def check(self, prompts):
        pass

    def score(self, clips, prompts, fps):
        return {"light": self.sign * torch.stack([clip.double().mean() / 255 for clip in clips])}


@pytest.fixture
def hacked(flags, tmp_path, monkeypatch):
    """Flags of a run that learns to make clips lighter, which the held-out reward does not like."""
    monkeypatch.setitem(REWARDS, "bright", lambda setup: Bright(1))
    monkeypatch.setitem(REWARDS, "dark", lambda setup: Bright(-1))
    prompts = tmp_path / "held_out.txt"
    places = ("left", "right", "up", "down")  # eight clips, the fewest that the report judges
    prompts.write_text(
        "".join(f"a {c} circle moving {d}\n" for c in ("red", "green") for d in places)
    )
    return flags | {
        "reward_model": "bright", "reward_weights": {"light": 1.0}, "holdout_reward": "dark", "kl_weight": 0,
        "validation_prompts": str(prompts), "validate_at_step0": True, "validation_interval": 4, "max_steps": 8,
        "learning_rate": 3e-3, "batch_size": 8, "num_generations": 4, "num_sampling_steps": 2,
    }  # fmt: skip


def test_a_run_that_is_hacked_says_so_and_stops_if_asked(undrawn, hacked, tmp_path, capfd):
    assert post_train.main(command_line(hacked)) == 0
    run = read_run(tmp_path / "run")
    diverged = [line["holdout/diverged"] for line in run.validations]
    assert diverged[0] is None and diverged[-1] == 1 and len(diverged) == 3
    assert run.validations[-1]["reward/total"] > run.validations[0]["reward/total"]
    assert hacking_verdict(run).startswith(
        "reward hacking: from iteration 0 to 8 the trained reward changed by +"
    )
    text = page(run)
    assert "reward hacking: from iteration 0 to 8" in text
    assert "<h3>Trained against held out</h3>" in text
    moved = drift(run)
    assert moved["trained"][0].mean == 0
    assert moved["trained"][8].sign == 1
    assert moved["held out"][8].sign == -1
    # one is minus the other
    assert moved["trained"][8].mean == pytest.approx(-moved["held out"][8].mean)
    capfd.readouterr()

    assert post_train.main(command_line(hacked | {"stop_on_hacking": True, "overwrite": True})) == 1
    told = capfd.readouterr().err
    stopped = read_run(tmp_path / "run").validations[-1]
    assert stopped["step"] == 4 * diverged.index(1) and stopped["holdout/diverged"] == 1
    assert f"from iteration 0 to {stopped['step']} the trained reward changed by +" in told
    assert "held-out one by -" in told


def test_a_holdout_that_follows_is_no_hacking(undrawn, hacked, make):
    trainer = make(**hacked | {"holdout_reward": "bright", "stop_on_hacking": True, "max_steps": 4})
    trainer.train()
    trainer.run.close()
    run = read_run(trainer.run.path)
    assert [line["holdout/diverged"] for line in run.validations] == [None, 0]
    assert hacking_verdict(run) == ""
    assert drift(run)["held out"] == drift(run)["trained"]
    listing = run.folder / "validation" / "step-000004" / "clips.json"
    records = json.loads(listing.read_text())
    write_json(listing, [record | {"holdout": {"light": None}} for record in records])
    assert hacking_verdict(run) == "Too few clips for a verdict."
    write_json(listing, records)
    for file in run.folder.glob("validation/*/clips.json"):
        file.write_text(json.dumps(json.loads(file.read_text())[:7]))
    assert hacking_verdict(run) == "Too few clips for a verdict."


def record(seed, total, holdout, prompt="a"):
    return {
        "file": "a.mp4",
        "prompt": prompt,
        "seed": seed,
        "scores": {"total": total},
        "holdout": holdout,
    }


def read_again(folder, records):
    write_json(folder / "clips.json", records)
    return read_clips(folder)


def test_clips_are_compared_one_by_one(tmp_path):
    before = read_again(
        tmp_path, [record(seed, float(seed), {"x": 1.0, "y": 2.0 * seed}) for seed in range(5)]
    )
    records = [record(seed, seed + 1.0, {"x": 0.5, "y": 2.0 * seed}) for seed in (4, 2, 1, 3)]
    after = read_again(tmp_path, records)
    assert change(before, after, "reward") == Interval(1, 0)
    assert change(before, after, "held_out") == Interval(-0.5, 0)
    lost = [
        record(0, None, {"x": None, "y": 1.0}),
        record(9, 50.0, {}),
        record(2, 50.0, {}, prompt="b"),
    ]
    after = read_again(tmp_path, [*records, *lost])
    assert change(before, after, "reward") == Interval(1, 0)
    assert change(before, after, "held_out") == Interval(-0.5, 0)


@pytest.mark.parametrize(
    ("totals", "holdouts", "hacked"),
    [((1, 1.1, 0.9, 1), (-1, -1.1, -0.9, -1), True), ((1, 1.1, 0.9, 1), (-1, 1.1, -0.9, 0), False),
     ((-1, 1, -2, 2), (-1, -1.1, -0.9, -1), False), ((-1, -1.1, -0.9, -1), (-1, -1.1, -0.9, -1), False)],
)  # fmt: skip
def test_both_intervals_must_leave_out_zero(tmp_path, totals, holdouts, hacked, capsys):
    for step, scale in ((0, 0), (5, 1), (7, -1)):
        folder = tmp_path / "validation" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        values = zip(2 * totals, 2 * holdouts, strict=True)
        records = [
            record(seed, scale * total, {"x": scale * held})
            for seed, (total, held) in enumerate(values)
        ]
        (folder / "clips.json").write_text(json.dumps(records))
    assert bool(divergence(tmp_path, 5)) == hacked
    assert divergence(tmp_path, 7) == ""
    assert divergence(tmp_path, 0) is None
    for file in tmp_path.glob("validation/*/clips.json"):
        file.write_text(json.dumps(json.loads(file.read_text())[:7]))
    assert divergence(tmp_path, 0) is None and capsys.readouterr().err == ""
    assert divergence(tmp_path, 5) is None
    assert "that needs 8 clips in each validation" in capsys.readouterr().err


@pytest.mark.parametrize(("reward", "hacked"), [(2.0, True), (0.5, False)])
def test_a_holdout_that_rose_first_is_compared_with_its_best(tmp_path, reward, hacked):
    for step, total, held in ((0, 0.0, 0.0), (5, 1.0, 2.0), (8, 1.0, 1.5), (10, reward, 1.0)):
        folder = tmp_path / "validation" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "clips.json").write_text(
            json.dumps([record(seed, total, {"x": held}) for seed in range(8)])
        )
    told = divergence(tmp_path, 10)
    assert (
        told.startswith("reward hacking: from iteration 5 to 10 the trained reward changed by +1")
        if hacked
        else not told
    )
    assert not divergence(tmp_path, 5) and not divergence(tmp_path, 8)
