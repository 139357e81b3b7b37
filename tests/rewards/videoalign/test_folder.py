"""An invalid VideoAlign folder is rejected with one sentence that names the file."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_grpo.rewards.videoalign.folder import (
    model_weights,
    newest_checkpoint,
    read_template,
    read_tokenizer,
    read_weights,
)
from sage_grpo.rewards.videoalign.reward import VideoAlign
from sage_grpo.rewards.videoalign.writing import stored_dtype

FIXTURES = Path(__file__).parents[2] / "fixtures"

NEEDED = {
    "VideoReward": [
        "model_config.json",
        "prompt_template.txt",
        "base_config/config.json",
        "base_config/preprocessor_config.json",
        "base_config/chat_template.json",
        "checkpoint-11352/model.safetensors",
        "checkpoint-11352/tokenizer/tokenizer.json",
    ],
    "VideoReward_split": [
        "base_config/model.safetensors",
        "checkpoint-300/non_lora_state_dict.safetensors",
        "checkpoint-300/adapter_model.safetensors",
    ],
}
FILES = [(name, file) for name, files in NEEDED.items() for file in files]


@pytest.fixture
def broken(videoalign_folders, tmp_path):
    """broken(name) -> a copy of one of the folders that may be changed."""

    def copy(name="VideoReward"):
        return shutil.copytree(
            videoalign_folders[name], tmp_path / name, ignore=shutil.ignore_patterns("*.pth")
        )

    return copy


def refused(folder, kind=ValueError):
    with pytest.raises(kind) as caught:
        VideoAlign(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text


def change(path, **values):
    """Put values into a JSON file; a__b reaches into a."""
    content = json.loads(path.read_text())
    for name, value in values.items():
        *outer, last = name.split("__")
        inner = content
        for key in outer:
            inner = inner[key]
        inner[last] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name, file", FILES, ids=lambda value: value.rpartition("/")[2])
def test_a_missing_file_is_named(broken, name, file):
    folder = broken(name)
    (folder / file).unlink()
    text = refused(folder, FileNotFoundError)
    named = {
        "base_config/model.safetensors": "base_config",
        "checkpoint-300/adapter_model.safetensors": "checkpoint-300",
    }
    assert str(folder / named.get(file, file)) in text


@pytest.mark.parametrize("name, file", FILES, ids=lambda value: value.rpartition("/")[2])
@pytest.mark.parametrize("left", [0.5, 0.0], ids=["half", "empty"])
def test_a_truncated_file_is_named(broken, name, file, left):
    folder = broken(name)
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: int(len(content) * left)])
    assert str(folder / file) in refused(folder)


@pytest.mark.parametrize("file", [file for _, file in FILES if file.endswith(".json")])
def test_a_list_is_no_object(broken, file):
    folder = broken()
    (folder / file).write_text("[1, 2]")
    assert f"{folder / file} is not a JSON object" in refused(folder)


def test_the_folder_itself_may_be_missing(tmp_path):
    assert "--reward_path" in refused(tmp_path / "nowhere", FileNotFoundError)


@pytest.mark.parametrize("writable", [True, False])
def test_a_published_folder_is_converted_the_first_time(tmp_path, monkeypatch, writable):
    folder = shutil.copytree(FIXTURES / "videoalign" / "VideoReward", tmp_path / "VideoReward")
    target = folder / "checkpoint-11352" / "model.safetensors"
    monkeypatch.setattr(os, "access", lambda *_: writable)
    weights = read_weights(target)
    expected = torch.load(target.with_suffix(".pth"), weights_only=True)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert target.is_file() == writable


@pytest.mark.parametrize(
    "file, values, words",
    [
        (
            "model_config.json",
            {"data_config__prompt_template_type": "none"},
            "prompt_template_type 'none'",
        ),
        ("model_config.json", {"data_config__eval_dim": ["VQ"]}, r"eval_dim ['VQ']"),
        ("model_config.json", {"data_config__sample_type": "multi_pts"}, "sample_type 'multi_pts'"),
        ("model_config.json", {"model_config__reward_token": "last"}, "reward_token 'last'"),
        (
            "model_config.json",
            {"model_config__output_dim": 2},
            "output_dim 2, which must be 1 or 3",
        ),
        ("model_config.json", {"peft_lora_config__use_rslora": True}, "use_rslora True"),
        ("model_config.json", {"peft_lora_config__lora_enable": False}, "lora_enable False"),
        ("model_config.json", {"data_config": {}}, "eval_dim None"),
        ("model_config.json", {"data_config__fps": None}, "fps None; it must be a number above 0"),
        (
            "model_config.json",
            {"data_config__min_frame_pixels": "x"},
            "min_frame_pixels 'x'; it must be a number",
        ),
        ("model_config.json", {"inference_config": {"VQ_std": 1}}, "MQ_std None"),
        (
            "model_config.json",
            {"inference_config__VQ_std": 0},
            "VQ_std 0; it must be a number above 0",
        ),
        ("base_config/preprocessor_config.json", {"patch_size": 16}, "patch_size 16"),
        ("base_config/config.json", {"model_type": "qwen2_5_vl"}, "model_type 'qwen2_5_vl'"),
        ("base_config/config.json", {"num_hidden_layers": 3}, "layers.2."),
        (
            "base_config/config.json",
            {"intermediate_size": 100},
            "[96, 64]) from checkpoint, the shape in current model is torch.Size([100, 64])",
        ),
        ("base_config/chat_template.json", {"chat_template": None}, "no chat_template"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_another_version_is_refused(broken, file, values, words):
    folder = broken()
    change(folder / file, **values)
    text = refused(folder)
    assert words in text
    assert file.rpartition("/")[2] in text


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("key", ["model.norm.weight", "rm_head.weight"])
def test_weights_that_are_not_finite_are_refused(broken, key, value):
    folder = broken()
    file = folder / "checkpoint-11352" / "model.safetensors"
    weights = load_file(file)
    weights[f"base_model.model.{key}"].view(-1)[3] = value
    save_file(weights, file)
    assert f"{file} is damaged: base_model.model.{key} is not finite" in refused(folder)
    assert stored_dtype(folder) == torch.bfloat16  # read from the header


def test_numbers_that_cannot_be_checked_are_refused(broken):
    folder = broken()
    file = folder / "checkpoint-11352" / "model.safetensors"
    weights = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(file).items()}
    save_file(weights, file)
    assert f"{file} cannot be used (NotImplementedError: " in refused(folder)


@pytest.mark.parametrize(
    "lost",
    [
        "rm_head.weight",
        "model.embed_tokens.weight",
        "visual.merger.mlp.2.bias",
        "model.layers.1.mlp.up_proj.lora_B.default.weight",
    ],
)
def test_a_lost_tensor_is_refused(broken, lost):
    folder = broken()
    file = folder / "checkpoint-11352" / "model.safetensors"
    weights = load_file(file)
    del weights[f"base_model.model.{lost}"]
    save_file(weights, file)
    assert str(file.parent) in refused(folder)


def test_keys_are_renamed_and_adapters_merged():
    up = torch.randn(4, 2)
    down = torch.randn(2, 3)
    weight = torch.randn(4, 3)
    published = {
        "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight": weight,
        "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight": down,
        "base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight": up,
        "base_model.model.visual.merger.ln_q.bias": torch.ones(3),
        "base_model.model.lm_head.weight": torch.ones(3),
        "base_model.model.rm_head.weight": torch.ones(1, 3, dtype=torch.bfloat16),
    }
    weights = model_weights(published, 2.0, torch.float32)
    assert weights.keys() == {
        "language_model.layers.0.mlp.up_proj.weight",
        "visual.merger.ln_q.bias",
        "rm_head.weight",
    }
    torch.testing.assert_close(
        weights["language_model.layers.0.mlp.up_proj.weight"], weight + 2 * up @ down
    )
    assert weights["rm_head.weight"].dtype == torch.float32
    split = {
        name.replace(".default", "").replace(".base_layer", ""): tensor
        for name, tensor in published.items()
    }
    assert all(
        torch.equal(weights[name], value)
        for name, value in model_weights(split, 2.0, torch.float32).items()
    )


def test_the_template_is_read_byte_for_byte(broken):
    folder = broken()
    file = folder / "prompt_template.txt"
    assert read_template(folder).encode() == file.read_bytes()
    assert read_template(folder).startswith("\n")
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n") + b"  \n")
    assert read_template(folder).count("\r\n") == file.read_bytes().count(b"\r\n") > 10
    for wrong in (b"{text_prompt} {text_prompt}", b"", b"\xff"):
        file.write_bytes(file.read_bytes().replace(b"{text_prompt}", wrong))
        assert str(file) in refused(folder)


def test_reward_tokens_follow_the_vocabulary(broken):
    folder = broken()
    checkpoint = newest_checkpoint(folder)
    tokenizer = read_tokenizer(folder, checkpoint)
    tokens = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]
    assert tokenizer.convert_tokens_to_ids(tokens) == [574, 575, 576]
    assert len(tokenizer) == 577
    file = checkpoint / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text().replace("<|MQ_reward|>", "<|QM_reward|>"))
    assert f"{file} does not know <|MQ_reward|>" in refused(folder)


def test_a_tokenizer_of_another_size_is_refused(broken):
    folder = broken()
    file = folder / "checkpoint-11352" / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 577, "content": "<|more|>"})
    file.write_text(json.dumps(content))
    assert "embeds 577 tokens, but its tokenizer has 578" in refused(folder)


def test_the_newest_checkpoint_counts(tmp_path):
    for name in ("checkpoint-900", "checkpoint-11352", "checkpoint-old"):
        (tmp_path / name).mkdir()
    assert newest_checkpoint(tmp_path).name == "checkpoint-11352"
    with pytest.raises(FileNotFoundError, match="no checkpoint-N folder"):
        newest_checkpoint(tmp_path / "checkpoint-900")
