"""post_train.py as a user runs it: from the command line, with wrong input, and on two ranks."""

import json
from pathlib import Path

import pytest

import post_train
from sage_grpo.environment import TOKEN_VARIABLE
from sage_grpo.rewards import client
from sage_grpo.tools.report import page as report
from sage_grpo.train.trainer import Trainer
from sage_grpo.worlds.shapes.reward import ShapesReward
from tests import elastic
from tests.rewards.serving import TOKEN, composite, serving
from tests.smallest_run import PROMPTS, command_line, slow

PRINT_SUMMARY = report.print_summary  # which draws, and so is left out of the smallest run


@pytest.fixture
def command(flags):
    """command(word, ..., flag=value, ...) -> a command line of one iteration."""
    light = {"max_steps": 1, "num_sampling_steps": 2, "validate_at_step0": True}

    def build(*extra, **changes):
        return [*command_line(flags | light | changes), *extra]

    return build


def test_a_run_leaves_everything_to_look_at(command, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(report, "print_summary", PRINT_SUMMARY)
    assert post_train.main(command(report_to="tensorboard", validation_videos=3)) == 0
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "command.txt", "status.json", "metrics.jsonl", "validation", "checkpoints", "tensorboard",
        "report.html",
    }  # fmt: skip
    clips = json.loads((run / "validation" / "step-000000" / "clips.json").read_text())
    assert len(clips) == len(PROMPTS)
    assert all((run / "validation/step-000001" / clip["file"]).stat().st_size for clip in clips)
    assert PROMPTS[0] in (run / "report.html").read_text()
    assert "learning_rate: 0.001" in (run / "config.yaml").read_text()
    out = capfd.readouterr().out
    assert "report.html" in out and "reward" in out


@pytest.mark.parametrize(
    "extra, changes, words",
    [
        (["--learning_rat", "1"], {}, "did you mean --learning_rate"),
        ([], {"batch_size": 3}, "nearest batch_size is 2 or 4"),
        ([], {"pretrained_model_root": "missing"}, "Model folder 'missing' does not exist"),
        ([], {"train_prompts": "empty.txt"}, "holds no prompt"),
        ([], {"train_prompts": "missing.txt"}, "does not exist"),
        ([], {"train_prompts": "strange.txt"}, "purple"),
        ([], {"reward_model": "applause"}, "choose one of videoalign, .*, shapes"),
        ([], {"reward_weights": '{"beauty": 1}'}, "reward_weights names beauty"),
        ([], {"sde_window": "random:9"}, "sde_window .* 9"),
        ([], {"sde_type": "cps", "eta": 2}, "at most 1"),
        ([], {"updates_per_rollout": 3}, "updates_per_rollout is 3, but a rollout trains 2"),
        ([], {"validation_fixed_size": "big"}, "write HEIGHTxWIDTH"),
        (["--use_lora", "--lora_target_modules", "to_z"], {}, "lora_target_modules names to_z"),
        (["--use_lora", "--pretrained_lora_path", "nowhere"], {}, "pretrained_lora_path nowhere"),
        (["--resume_from_checkpoint", "nowhere"], {}, "nowhere does not exist"),
        (
            ["--init_from_checkpoint", "nowhere"],
            {},
            "init_from_checkpoint nowhere has no transformer",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_input_is_one_sentence_and_writes_nothing(
    command, tmp_path, monkeypatch, capfd, extra, changes, words
):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n")
    Path("strange.txt").write_text("a purple elephant\n")
    assert post_train.main(command(*extra, **changes)) == 2
    said = [
        line for line in capfd.readouterr().err.splitlines() if line.startswith("post_train.py: ")
    ]
    assert len(said) == 1
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(said[0])
    assert not (tmp_path / "run").exists()


def test_a_model_in_tencents_layout_trains(command, tencent_folder, tmp_path, capfd):
    model = {"pretrained_model_root": tencent_folder, "validate_at_step0": False}
    assert post_train.main(command(**model)) == 0
    assert (tmp_path / "run" / "checkpoints" / "step-000001" / "transformer").is_dir()
    model |= {"output_dir": tmp_path / "other", "pretrained_transformer_version": "720p_t2v"}
    capfd.readouterr()
    assert post_train.main(command(**model)) == 2
    assert "has no 720p_t2v" in capfd.readouterr().err and not (tmp_path / "other").exists()


def test_a_fault_of_the_program_is_not_called_wrong_input(command, tmp_path, monkeypatch, capfd):
    def fails(*_):
        raise ValueError("a bug")

    monkeypatch.setattr(Trainer, "advantages", fails)
    assert post_train.main(command()) == 1
    told = capfd.readouterr().err
    assert "Traceback" in told and "post_train.py: " not in told
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["step"], status["message"]) == ("failed", 0, "a bug")


def test_a_resumed_run_reports_its_iteration_from_the_start(command, tmp_path, monkeypatch):
    assert post_train.main(command()) == 0
    monkeypatch.setattr(Trainer, "catch_up", lambda trainer: 1 / 0)
    assert post_train.main(command("--resume_from_checkpoint", "auto", max_steps=2)) == 1
    assert json.loads((tmp_path / "run" / "status.json").read_text())["step"] == 1


def test_an_existing_run_is_not_touched_without_being_told(command, tmp_path, capfd):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("precious\n")
    assert post_train.main(command()) == 2
    assert "already holds a run" in capfd.readouterr().err
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]
    assert (run / "metrics.jsonl").read_text() == "precious\n"
    for name in ("notes.txt", "config.yaml", "command.txt"):
        (run / name).write_text("mine")
    assert post_train.main(command("--overwrite")) == 0
    assert (run / "notes.txt").read_text() == "mine" and "precious" not in (
        run / "metrics.jsonl"
    ).read_text()


def launch(ranks, words):
    process = elastic.start(words, ranks)
    process.join(600)
    assert process.exitcode == 0


GROUPS = (2, {"batch_size": 2})
SEQUENCES = (2, {"batch_size": 4, "sp_size": 2, "enable_fsdp": True})


@pytest.mark.parametrize("model, layout", [("trivial", GROUPS), slow("tiny", SEQUENCES)])
def test_two_ranks_train_as_one_does(command, tmp_path, layout):
    """Clips, rewards and gradient do not depend on the rank: groups are split over ranks. Slow: sequences, too."""
    records = []
    for number, (ranks, split) in enumerate(((1, {"batch_size": 4}), layout)):
        run = tmp_path / str(number)
        shared = {
            "max_steps": 2,
            "micro_batch_size": 1,
            "num_generations": 4,
            "validate_at_step0": False,
        }
        launch(ranks, command(output_dir=run, **split, **shared))
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        records.append({(line["kind"], line["step"]): line for line in lines})
    one, *others = records
    for two in others:
        assert one.keys() == two.keys() and two["run", 0]["ranks"] == 2
        for name in ("reward/total", "policy/grad_norm", "kl/anchor", "reward/group_std"):
            assert one["train", 1][name] == pytest.approx(
                two["train", 1][name], rel=1e-4, abs=1e-9
            ), name
            assert one["train", 2][name] == pytest.approx(
                two["train", 2][name], rel=2e-2, abs=1e-6
            ), name
        assert one["validation", 2]["count"] == two["validation", 2]["count"] == len(PROMPTS)
        assert one["train", 1]["per_step"]["count"] == two["train", 1]["per_step"]["count"]


def train_records(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        {k: v for k, v in line.items() if not k.startswith(("time", "memory"))} for line in lines
    ][1:]


def test_training_on_a_remote_reward_is_training_on_that_reward(command, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert post_train.main(command(max_steps=2, output_dir=tmp_path / "here")) == 0
    with serving(composite({"shapes": ShapesReward()})) as url:
        there = {
            "reward_model": "remote",
            "remote_reward_url": url,
            "output_dir": tmp_path / "there",
        }
        assert post_train.main(command(max_steps=2, **there)) == 0
    here, there = (train_records(tmp_path / name) for name in ("here", "there"))
    assert here == there and len(here) == 4 and here[1]["reward/failed"] == 0
    assert not [
        file
        for file in (tmp_path / "there").rglob("*")
        if file.is_file() and TOKEN in file.read_text("latin-1")
    ]


class DiesLater(ShapesReward):
    """Answers the validation before training, and then no more."""

    calls = 0

    def score(self, clips, prompts, fps):
        self.calls += 1
        if self.calls > 1:
            raise OSError("the GPU fell off the bus")
        return super().score(clips, prompts, fps)


def test_a_remote_reward_that_fails_ends_the_run_with_its_words(command, monkeypatch, capfd):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setattr(client, "PAUSES", (0.01,))
    with serving(composite({"shapes": DiesLater()})) as url:
        assert post_train.main(command(reward_model="remote", remote_reward_url=url)) == 1
    assert (
        "100% of the rewards failed" in (told := capfd.readouterr().err)
        and "the GPU fell off the bus" in told
    )
    assert (
        post_train.main(command("--overwrite", reward_model="remote", remote_reward_url=url)) == 2
    )
    assert f"remote_reward_url {url} could not be used 2 times in a row" in capfd.readouterr().err
