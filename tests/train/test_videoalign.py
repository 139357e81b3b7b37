"""Two iterations of training on VideoAlign's scores."""

import json
import shutil

import pytest


def test_training_on_videoalign(make, videoalign_folders):
    trainer = make(
        reward_model="videoalign",
        reward_path=str(videoalign_folders["VideoReward"]),
        reward_weights={"VQ": 0.5, "MQ": 0.5, "TA": 1.0},
        validation_interval=0,
    )
    before = {name: p.detach().clone() for name, p in trainer.optimization.parameters.items()}
    trainer.train()
    trainer.run.close()
    lines = [
        json.loads(line) for line in (trainer.run.path / "metrics.jsonl").read_text().splitlines()
    ]
    records = [line for line in lines if line["kind"] == "train"]
    assert [record["updates"] for record in records] == [1, 2]
    for record in records:
        assert record["reward/failed"] == 0 and record["reward/group_std"] > 0
        total = 0.5 * record["reward/VQ"] + 0.5 * record["reward/MQ"] + record["reward/TA"]
        assert record["reward/total"] == pytest.approx(total)
    assert any((before[name] != p).any() for name, p in trainer.optimization.parameters.items())
    validation = next(line for line in lines if line["kind"] == "validation")
    assert {"reward/VQ", "reward/MQ", "reward/TA"} <= validation.keys()


@pytest.mark.parametrize(("given", "rate"), [({}, 3.0), ({"reward_fps": 4.0}, 4.0)])
def test_the_folder_decides_on_the_rate_of_sampling_unless_the_flag_does(
    make, videoalign_folders, tmp_path, given, rate
):
    folder = tmp_path / "VideoReward"
    shutil.copytree(videoalign_folders["VideoReward"], folder)
    settings_file = folder / "model_config.json"
    settings = json.loads(settings_file.read_text())
    settings["data_config"]["fps"] = 3.0
    settings_file.write_text(json.dumps(settings))
    trainer = make(reward_model="videoalign", reward_path=str(folder), **given)
    assert trainer.reward.rewards["videoalign"].sample_fps == rate
    trainer.run.close()


def test_the_default_place_is_the_model_folder(make, trivial_folder):
    with pytest.raises(
        FileNotFoundError, match=f"{trivial_folder / 'VideoReward'} .*--reward_path"
    ):
        make(reward_model="videoalign")
