"""Assembling a trainer: default prompts, and text encoders that are loaded once or never."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch

from sage_grpo.config.fields import ConfigError
from sage_grpo.config.parse import from_values
from sage_grpo.models import backbone
from sage_grpo.models.hunyuan15 import text
from sage_grpo.train import build
from sage_grpo.train.build import build_trainer, open_model, perfect_is_best
from sage_grpo.train.inputs import BUNDLED_PROMPTS, requests_from, reward_names
from sage_grpo.worlds.shapes.world import ShapesWorld
from tests.dist import run_ranks
from tests.smallest_run import on_tiny


@pytest.fixture
def loads(monkeypatch):
    """One entry for every time that text encoders are loaded."""
    plain, seen = text.load_encoders, []
    monkeypatch.setattr(
        text, "load_encoders", lambda folder, *rest: seen.append(folder) or plain(folder, *rest)
    )
    return seen


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.optimization.parameters.items()}


def validated(trainer):
    lines = map(json.loads, (trainer.run.path / "metrics.jsonl").read_text().splitlines())
    return [line["reward/total"] for line in lines if line["kind"] == "validation"]


@on_tiny
def test_encoders_are_loaded_once_or_never_and_change_nothing(make, loads, tmp_path):
    """Without a cache, with an empty one, and with a full one: guidance, training and validation are the same."""
    runs = []
    for number, cache in enumerate((None, "cache", "cache")):
        cache = cache and str(tmp_path / cache)
        trainer = make(
            prompt_cache=cache,
            output_dir=str(tmp_path / str(number)),
            guidance_scale=2.0,
            use_lora=True,
            max_steps=1,
        )
        # on the CPU they stay for prompts that an iteration needs, unless all are in a cache
        assert (trainer.backbone.embeddings.encoder._models is None) == (cache is not None)
        at_build = len(loads)
        trainer.train()
        assert len(loads) == at_build  # neither rollout nor validation loads them again
        runs.append((at_build, weights(trainer), validated(trainer)))
    assert [count for count, *_ in runs] == [1, 2, 2]
    _, expected, rewards = runs[0]
    for _, found, again in runs[1:]:
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert again == rewards and len(rewards) == 1


def test_without_a_cache_prompts_are_encoded_when_an_iteration_needs_them(make, tmp_path):
    """The numbers are those of a run that fills a cache with all prompts first."""
    trainer = make(max_steps=1, batch_size=2)
    encoded = trainer.backbone.embeddings.in_memory
    assert [request.text for request in encoded] == [""]
    trainer.roll_out()
    assert len(encoded) == 2
    trainer.train()

    ahead = make(
        max_steps=1,
        batch_size=2,
        output_dir=str(tmp_path / "ahead"),
        prompt_cache=str(tmp_path / "cache"),
    )
    assert len(list((tmp_path / "cache").glob("*/*.safetensors"))) == 1 + len(trainer.requests)
    ahead.train()
    expected = weights(ahead)
    assert all(torch.equal(found, expected[name]) for name, found in weights(trainer).items())


@pytest.mark.parametrize(
    "model, device, most_resident, cached, ahead",
    [
        ("tiny", "cpu", 1e8, False, False),
        ("tiny", "cpu", 0, False, False),
        ("tiny", "cpu", 1e8, True, True),
        ("tiny", "cuda", 1e8, False, False),  # encoders of a few hundred kilobytes may stay
        ("tiny", "cuda", 0, False, True),
        ("tiny", "cuda", 1e8, True, True),
        ("trivial", "cuda", 1e8, False, True),  # of unknown size
    ],
)
def test_large_encoders_leave_a_gpu_before_training(
    flags, device, most_resident, cached, ahead, tmp_path, monkeypatch
):
    monkeypatch.setattr(backbone, "MAX_RESIDENT", most_resident)
    cache = {"prompt_cache": str(tmp_path)} if cached else {}
    opened, _ = open_model(from_values(flags | cache), torch.device("cpu"))
    opened.device = torch.device(device)  # asking needs no GPU
    assert opened.encodes_ahead is ahead


def test_a_run_goes_on_the_same_with_embeddings_from_disk(make, loads, tmp_path):
    whole = make(save_interval=1, output_dir=str(tmp_path / "whole"))
    whole.train()
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-000002")
    onward = {"output_dir": str(tmp_path / "resumed"), "resume_from_checkpoint": "auto"}
    resumed = make(**onward, prompt_cache=str(tmp_path / "cache"))
    assert resumed.step == 1
    resumed.train()
    expected = weights(whole)
    assert all(torch.equal(found, expected[name]) for name, found in weights(resumed).items())


def test_prompts_are_those_of_the_flag_the_folder_or_ours(tmp_path):
    trained = requests_from(None, tmp_path, "train")
    assert (
        len(trained) > 300
        and requests_from((str(BUNDLED_PROMPTS / "train_long.csv"),), tmp_path, "valid") == trained
    )
    assert all(prompt.seed is not None for prompt in requests_from(None, tmp_path, "valid"))
    (tmp_path / "prompts_train.txt").write_text("a red circle\n")
    assert [prompt.text for prompt in requests_from(None, tmp_path, "train")] == ["a red circle"]


def test_a_model_of_a_world_has_prompts_of_its_own_or_none(tmp_path):
    (tmp_path / "world.json").write_text('{"world": "shapes"}')
    assert requests_from(None, tmp_path, "valid") == []
    with pytest.raises(
        ConfigError, match=r"has no prompts_train\.txt; name a prompt file with --train_prompts"
    ):
        requests_from(None, tmp_path, "train")


def test_prompts_of_several_files_are_numbered_through(tmp_path):
    files = [tmp_path / "a.txt", tmp_path / "b.csv"]
    files[0].write_text("red\ngreen\n")
    files[1].write_text("prompt,index,seed\nblue,0,5\n")
    found = requests_from([str(file) for file in files], tmp_path, "train")
    assert [(prompt.text, prompt.index, prompt.seed) for prompt in found] == [
        ("red", 0, None), ("green", 1, None), ("blue", 2, 5)
    ]  # fmt: skip
    assert [prompt.index for prompt in requests_from([str(files[1])], tmp_path, "train")] == [0]


def test_a_reward_may_take_half_of_what_ranks_wait_for_each_other(make):
    trainer = make(collective_timeout=100, reward_batch_size=3)
    assert (trainer.reward.timeout, trainer.reward.batch_size) == (50, 3)


def build_slowly(ranks, values):
    """The second rank looks for an older run only after the first had time to write its own."""
    if ranks.dp_rank == 1:
        look, config = build.RunFolder, Path(values["output_dir"]) / "config.yaml"

        def late(*arguments):
            end = time.monotonic() + 2
            while time.monotonic() < end and not config.is_file():
                time.sleep(0.05)
            return look(*arguments)

        build.RunFolder = late
    return build_trainer(from_values(values), ranks).step


def test_a_slow_rank_does_not_take_the_new_run_for_an_older_one(flags):
    assert run_ranks(2, build_slowly, flags | {"batch_size": 2}) == [0, 0]


def test_without_a_name_the_reward_is_that_of_the_model_folder_or_of_its_world(flags, tmp_path):
    flags.pop("reward_model")
    assert reward_names(from_values(flags)) == ("videoalign",)
    (tmp_path / "world").mkdir()
    (tmp_path / "world" / "world.json").write_text('{"world": "shapes"}')
    flags["pretrained_model_root"] = str(tmp_path / "world")
    assert reward_names(from_values(flags)) == ("shapes",)
    learned = tmp_path / "VideoReward"
    learned.mkdir()
    assert reward_names(from_values(flags | {"reward_path": str(learned)})) == ("videoalign",)
    assert reward_names(
        from_values(flags | {"reward_path": str(learned), "reward_model": "ocr"})
    ) == ("ocr",)


@pytest.mark.parametrize(
    "changes, is_best",
    [
        ({"reward_model": ["shapes"]}, True),
        ({"reward_model": ["motion"]}, False),  # more motion than a prompt asks for scores more
        ({"reward_model": ["shapes", "motion"]}, False),
        ({"reward_model": ["shapes"], "reward_weights": {"VQ": -1, "MQ": 1, "TA": 1}}, False),
    ],
)
def test_perfect_clips_are_the_best_in_the_rewards_of_their_world_alone(make, changes, is_best):
    trainer = make(**changes)
    trainer.run.close()
    assert perfect_is_best(trainer.config, trainer.reward, ShapesWorld()) is is_best


@pytest.mark.parametrize(
    ("layout", "version"), [("i2v_folder", "480p_t2v"), ("tencent_i2v_folder", "480p_i2v")]
)
def test_the_version_decides_the_task_in_tencents_layout(flags, layout, version, request):
    own = {
        "pretrained_model_root": str(request.getfixturevalue(layout)),
        "pretrained_transformer_version": version,
    }
    backbone, _ = open_model(from_values(flags | own), torch.device("meta"))
    assert backbone.sees_image and backbone.version == version


@pytest.mark.parametrize("compiled", [False, True])
def test_what_the_decoder_needs_to_know_comes_from_the_flags(flags, compiled):
    backbone, _ = open_model(
        from_values(flags | {"decode_gb": 3.0, "compile": compiled}), torch.device("meta")
    )
    assert (backbone.decode_gb, backbone.compiled) == (3.0, compiled)
