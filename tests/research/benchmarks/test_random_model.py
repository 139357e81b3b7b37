"""Random weights of any size, in folders that the loaders can read, with the published sizes and names."""

import json

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15
from transformers import Qwen2VLConfig

from research.benchmarks import random_model as script
from research.benchmarks import random_reward, random_weights
from research.tiny.videoreward.folder import SPECIAL, base_config
from sage_grpo.data.requests import Request
from sage_grpo.models.registry import open_backbone
from sage_grpo.models.weights import check_names, open_folder
from sage_grpo.rewards.videoalign.reward import VideoAlign

SIZES = {"latent_channels": 4, "block_out_channels": (16, 32, 32), "layers_per_block": 1}
SIZES |= {"spatial_compression_ratio": 4, "temporal_compression_ratio": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    output = tmp_path_factory.mktemp("random") / "model"
    script.main(["--tiny", "--reward", "--device", "cpu", "--output", str(output)])
    return output


def vae():
    with torch.device("meta"):
        return AutoencoderKLHunyuanVideo15(**SIZES)


@pytest.mark.parametrize("most, files", [(2e9, 1), (1e5, 8)])
def test_a_part_is_written_as_diffusers_writes_it(tmp_path, monkeypatch, most, files):
    monkeypatch.setattr(random_weights, "FILE_BYTES", most)
    writer, model = random_weights.Writer(torch.device("cpu")), vae()
    count = writer.model(tmp_path, model, model.to_json_string())
    writer.finish()
    assert len(list(tmp_path.glob("*.safetensors"))) >= files
    model = AutoencoderKLHunyuanVideo15.from_pretrained(tmp_path)
    assert sum(p.numel() for p in model.parameters()) == count
    check_names(
        open_folder(tmp_path), {name: value.shape for name, value in model.state_dict().items()}
    )
    assert 0.015 < model.encoder.conv_in.conv.weight.std() < 0.025
    gamma = model.encoder.down_blocks[0].resnets[0].norm1.gamma
    assert torch.equal(gamma, torch.ones_like(gamma))


def test_two_files_have_different_weights(tmp_path):
    writer = random_weights.Writer(torch.device("cpu"))
    for name in ("a", "b"):
        writer.file(tmp_path / f"{name}.safetensors", {name: (4, 4)})
    writer.finish()
    first, second = (open_folder(tmp_path).read(name) for name in ("a", "b"))
    assert (
        first.dtype == torch.bfloat16 and first.shape == (4, 4) and not torch.equal(first, second)
    )


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    writer = random_weights.Writer(torch.device("cpu"))
    writer.file(tmp_path / "none" / "a.safetensors", {"a": (2,)})
    with pytest.raises(FileNotFoundError):
        writer.finish()


def test_the_folder_can_encode_and_sample(folder):
    backbone = open_backbone(folder)
    cond = backbone.encode([Request('the camera shows "HI" on a wall', 0)])[0]
    assert cond.text.shape[1] == 64 and len(cond.glyph) > 2 and cond.text.isfinite().all()
    assert len(cond.text) < 20  # the words of prompts are tokens, not bytes
    x = torch.randn(1, *backbone.latent_shape(5, 16, 16))
    velocity = backbone.branch(x, 0.5, cond)
    assert velocity.shape == x.shape and velocity.isfinite().all() and velocity.std() > 0


def test_the_reward_scores(folder):
    reward = VideoAlign(folder / "VideoReward")
    clips = [torch.full((5, 64, 64, 3), value, dtype=torch.uint8) for value in (10, 200)]
    scores = reward.score(clips, ["a dog", "a dog"], 8)
    assert all(values.isfinite().all() and values[0] != values[1] for values in scores.values())
    assert (folder / "VideoReward" / "prompt_template.txt").stat().st_size == 3997


def test_the_full_reward_has_the_published_tensors(tmp_path):
    sizes, ids = random_reward.FULL, dict.fromkeys(SPECIAL, 5)
    config = base_config(sizes["text"], sizes["vision"], sizes["rows"], ids)
    (tmp_path / "config.json").write_text(json.dumps(config))
    config = Qwen2VLConfig.from_pretrained(tmp_path)
    shapes = random_reward.published_shapes(config, sizes["rows"], sizes["rank"])
    assert len(shapes) == 1123
    size = 2 * sum(torch.Size(shape).numel() for shape in shapes.values())
    assert (
        0 < 5_031_072_529 - size < 1e6
    )  # the published model.pth, which has names and padding too


def test_the_full_parts_have_the_published_sizes():
    parts = script.full_parts(None, True, 0)
    counts = {
        name: sum(p.numel() for p in model.parameters()) for name, (model, _) in parts.items()
    }
    assert counts["transformer"] == 8_326_608_160 and counts["vae"] == 1_260_634_115
    assert counts["text_encoder"] == 7_070_619_136 and 0.21e9 < counts["text_encoder_2"] < 0.22e9
    small = script.full_parts(2, False, 500)
    assert (
        small["transformer"][0].config.num_layers == 2
        and small["text_encoder"][0].config.vocab_size == 500
    )
    assert (
        json.loads(small["text_encoder"][1])["hidden_size"]
        == json.loads(parts["text_encoder"][1])["hidden_size"]
    )
