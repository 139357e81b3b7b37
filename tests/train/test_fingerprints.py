"""What shapes samples and rewards is fingerprinted, and a resumed run is told what changed."""

import dataclasses
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_grpo import plugins
from sage_grpo.config.fields import Config, RolloutFlags
from sage_grpo.environment import TOKEN_VARIABLE
from sage_grpo.models.registry import open_backbone
from sage_grpo.rewards.base import Composite, Setup
from sage_grpo.rewards.build import build_reward
from sage_grpo.train import fingerprints
from tests.rewards.serving import TOKEN, Light, composite, remote_reward, serving
from tests.rewards.test_clip import write_clip
from tests.rewards.test_judge import JSON_RUBRIC, judge_at, vlm

CPU = torch.device("cpu")
PLUGIN = "def calm(clips, prompts):\n    return [{factor} * clip.float().mean().item() for clip in clips]\n"


def scale_weights(folder):
    """Double one tensor of the first file of weights below a folder."""
    file = sorted(folder.rglob("*.safetensors"))[0]
    tensors = load_file(file)
    name = next(name for name, value in tensors.items() if value.is_floating_point())
    tensors[name] = tensors[name] * 2 + 1
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "model, part, changed",
    [
        ("tiny", "transformer", {"base weights"}),
        ("tiny", "vae", {"VAE"}),
        ("tiny", "text_encoder", {"encoders"}),
        ("tiny", "text_encoder_2", {"encoders"}),
        ("tencent", "vae", {"VAE"}),
        ("tencent", "text_encoder", {"encoders"}),
        ("i2v", "image_encoder", {"encoders"}),
        ("i2v", "vae", {"encoders", "VAE"}),  # it also encodes the image
        ("wan", "vae", {"VAE"}),
        ("wan", "text_encoder", {"encoders"}),
    ],
)
def test_scaled_weights_of_any_part_change_its_fingerprint(request, tmp_path, model, part, changed):
    folder = shutil.copytree(request.getfixturevalue(f"{model}_folder"), tmp_path / "model")
    version = "480p_t2v" if model == "tencent" else None
    before = open_backbone(folder, version=version).fingerprints()
    assert before == open_backbone(folder, version=version).fingerprints()
    scale_weights(folder / part)
    after = open_backbone(folder, version=version).fingerprints()
    assert {name for name in before if before[name] != after[name]} == changed


@pytest.mark.parametrize("name", ["videoalign", "clipscore", "pickscore"])
def test_scaled_weights_of_a_reward_change_its_fingerprint(videoalign_folders, tmp_path, name):
    folders = {
        "videoalign": "VideoReward",
        "clipscore": "clip-vit-large-patch14",
        "pickscore": "PickScore_v1",
    }
    shutil.copytree(videoalign_folders["VideoReward"], tmp_path / "VideoReward")
    for folder in ("clip-vit-large-patch14", "PickScore_v1"):
        write_clip(tmp_path / folder)

    def fingerprint():
        reward = build_reward(name, Setup(tmp_path / "VideoReward", CPU))
        return Composite({name: reward}, None).fingerprint()

    before = fingerprint()
    assert fingerprint() == before
    scale_weights(tmp_path / folders[name])
    after = fingerprint()
    assert {part for part in before if before[part] != after[part]} == {f"{name} weights"}


def test_rubric_and_model_of_a_judge_are_part_of_its_fingerprint(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    rubric = tmp_path / "rubric.txt"
    seen = []
    for model, text in (
        ("vlm", JSON_RUBRIC),
        ("vlm", JSON_RUBRIC.replace("nice", "ugly")),
        ("other", JSON_RUBRIC),
    ):
        rubric.write_text(text)
        with vlm(models=(model,)) as (url, _):
            seen.append(judge_at(url, rubric=str(rubric)).fingerprint())
    first, other_rubric, other_model = seen
    assert first["rubric"] != other_rubric["rubric"]
    assert first["model"] == other_rubric["model"] == "vlm"
    assert other_model == {"model": "other", "rubric": first["rubric"]}


def test_a_server_says_what_its_scores_depend_on_wherever_it_listens(monkeypatch):
    class Weighted(Light):
        def __init__(self, weights):
            self.weights = weights

        def fingerprint(self):
            return {"weights": self.weights}

    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    seen = []
    for weights in ("old", "old", "new"):
        with serving(composite({"light": Weighted(weights)})) as url:
            seen.append(remote_reward(url).fingerprint()["server"])
    assert seen[0] == seen[1] != seen[2]


def test_files_that_a_plugin_lists_are_part_of_its_fingerprint(tmp_path):
    (tmp_path / "weights").write_text("1")
    code = tmp_path / "own.py"
    code.write_text(
        f"class Own:\n    files = [{str(tmp_path / 'weights')!r}]\n"
        "    def score(self, clips, prompts):\n        return [0.0] * len(clips)\n"
    )
    plugins.trust(f"{code}:Own")

    def fingerprint():
        return build_reward(f"{code}:Own", Setup(tmp_path, CPU)).fingerprint()

    before = fingerprint()
    (tmp_path / "weights").write_text("2")
    assert fingerprint() == before | {"files": fingerprint()["files"]} != before
    (tmp_path / "weights").unlink()
    with pytest.raises(ValueError, match=r"lists .*weights in `files`, which does not exist"):
        fingerprint()


def test_a_resumed_run_names_each_thing_that_changed_in_a_sentence(
    make, flags, tmp_path, monkeypatch, capfd
):
    code = tmp_path / "own.py"
    code.write_text(PLUGIN.format(factor=1))
    plugins.trust(f"{code}:calm")
    changes = {"reward_model": f"{code}:calm", "reward_weights": {"calm": 1}, "max_steps": 1}
    make(**changes).train()

    code.write_text(PLUGIN.format(factor=2))
    monkeypatch.setattr(fingerprints, "versions", lambda: {"torch": "0.1"})
    capfd.readouterr()
    resumed = make(**changes | {"reward_weights": {"calm": 3}}, resume_from_checkpoint="auto")
    notes = re.findall("^note: changed since the checkpoint: (.*)$", capfd.readouterr().err, re.M)
    named = {note.partition(" '")[0].partition(" {")[0] for note in notes}
    assert named == {
        f"plug-ins {code}",
        "reward calm code",
        "reward weights",
        "reward_weights",
        "versions torch",
    }
    start = json.loads((resumed.run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert start["kind"] == "run"
    assert start["fingerprints"]["versions"] == {"torch": "0.1"}


@pytest.mark.parametrize(
    "changed, breaks",
    [
        ({"boundary": "0.9"}, True),
        ({"transformer_2 config": "other"}, True),
        ({"reward code of this program": "other"}, True),
        ({"reward": {"motion code": "other"}}, True),
        ({"versions": {"torch": "2.13.0", "transformers": "5.1.0"}}, True),
        ({"versions": {"torch": "2.13.1", "transformers": "5.0.0"}}, True),
        ({"versions": {"torch": "2.13.0", "transformers": "5.0.0", "sage_grpo": "0.2"}}, False),
        ({"device": "NVIDIA H200"}, False),
    ],
    ids=str,
)
def test_both_series_end_with_whatever_decides_how_clips_are_made_and_scored(changed, breaks):
    config = Config()
    before = {
        "boundary": "0.875",
        "transformer_2 config": "one",
        "reward code of this program": "one",
        "reward": {"motion code": "one"},
        "versions": {"torch": "2.13.0", "transformers": "5.0.0", "sage_grpo": "0.1"},
        "device": "CPU",
    }
    old = fingerprints.yardstick(config, before)
    new = fingerprints.yardstick(config, before | changed)
    assert [old[series] != new[series] for series in old] == [breaks, breaks]


def test_the_code_of_the_rewards_is_fingerprinted(make):
    hashes = make().fingerprints
    assert hashes["reward code of this program"] == fingerprints.reward_code() != ""


def test_versions_are_those_of_libraries_that_shape_samples():
    versions = fingerprints.versions()
    assert versions["torch"] == torch.__version__
    assert {"python", "sage_grpo", "diffusers", "transformers", "numpy"} <= versions.keys()


# flags of rollouts that say how many clips there are or how they are computed, not what a clip is; prompts have a
# fingerprint of their own
NOT_OF_A_CLIP = {
    "enable_timestep_permutation",
    "micro_batch_size",
    "prompts_per_forward",
    "timestep_fraction",
}


def test_every_flag_that_shapes_a_training_clip_is_part_of_its_yardstick():
    flags = {field.name for field in dataclasses.fields(RolloutFlags)}
    assert flags - NOT_OF_A_CLIP <= set(fingerprints.SETTINGS["train"])
