"""CLIPScore and PickScore against their formulas, on a tiny CLIP of the real classes with random weights."""

import json
import shutil
import string

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from sage_grpo.rewards.base import Setup
from sage_grpo.rewards.clip import ClipScore, PickScore
from sage_grpo.rewards.video_frames import MEAN, STD
from tests.hostile import change, write_bomb

SIDE = 32


class InHalf(Setup):
    dtype = torch.bfloat16


def built(kind, folder, setup=Setup):
    """A reward from a folder of any name."""
    named = type("Named", (kind,), {"folder": folder.name})
    return named(setup(folder.with_name("VideoReward"), torch.device("cpu")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip") / "folder")


def write_clip(folder):
    """A tiny CLIP with random weights."""
    folder.mkdir()
    letters = string.ascii_lowercase + string.digits + "!,."
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = sizes | {
        "vocab_size": len(words),
        "bos_token_id": len(words) - 2,
        "eos_token_id": len(words) - 1,
    }
    vision = sizes | {"image_size": SIDE, "patch_size": 8}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clips():
    generator = torch.Generator().manual_seed(3)
    coarse = [torch.rand(1, 3, n, 5, 6, generator=generator) for n in (4, 9, 24)]
    sizes = [(16, 48, 64), (9, 40, 40), (24, 70, 30)]
    smooth = [
        torch.nn.functional.interpolate(c, s, mode="trilinear")[0]
        for c, s in zip(coarse, sizes, strict=True)
    ]
    return [(clip.permute(1, 2, 3, 0) * 255).to(torch.uint8) for clip in smooth]


PROMPTS = ["a red boat", "boat", "two cats, " * 30]


def pil_pixels(frame):
    """Shorter side to SIDE, middle square, normalized: by PIL."""
    image = Image.fromarray(frame.numpy())
    scale = SIDE / min(image.size)
    image = image.resize([int(side * scale) for side in image.size], Image.Resampling.BICUBIC)
    left, top = ((side - SIDE) // 2 for side in image.size)
    pixels = np.asarray(image.crop((left, top, left + SIDE, top + SIDE)), dtype=np.float32) / 255
    return torch.from_numpy((pixels - np.float32(MEAN)) / np.float32(STD)).permute(2, 0, 1)


def test_pixels_are_those_that_clip_was_trained_on(folder, clips):
    reward = built(ClipScore, folder)
    for clip in clips:
        expected = torch.stack([pil_pixels(clip[0]), pil_pixels(clip[-1])])
        pixels = reward._pixels(clip, 8.0)[[0, -1]]
        # PIL rounds between its two passes
        assert (pixels - expected).abs().max() < 3 / 255 / min(STD)


@torch.no_grad()
def test_scores_are_those_of_the_formulas(folder, clips):
    """The model's own logits, with clips alone and prompts alone."""
    model = CLIPModel.from_pretrained(folder).eval()
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    clip_score = built(ClipScore, folder)
    pick_score = built(PickScore, folder)
    means = []
    for clip, prompt in zip(clips, PROMPTS, strict=True):
        tokens = tokenizer(prompt, truncation=True, max_length=77, return_tensors="pt")
        logits = model(pixel_values=clip_score._pixels(clip, 8.0), **tokens).logits_per_image
        means.append(logits.mean())
    raw = torch.stack(means)
    assert raw.std() > 0.1
    torch.testing.assert_close(pick_score.score(clips, PROMPTS, 8.0)["pickscore"], raw / 26)
    cosine = clip_score.score(clips, PROMPTS, 8.0)["cosine"]
    torch.testing.assert_close(cosine, raw / model.logit_scale.exp(), atol=1e-5, rtol=0)
    assert cosine.abs().max() <= 1


def test_half_precision_does_not_round_the_scale(folder, clips):
    """Published models have exp(logit_scale) = 100, which bf16 would round to 99."""
    clip_score = built(ClipScore, folder, InHalf)
    pick_score = built(PickScore, folder, InHalf)
    assert clip_score.model.dtype == pick_score.model.dtype == torch.bfloat16

    scale = CLIPModel.from_pretrained(folder).logit_scale.exp().item()
    rounded = torch.tensor(scale).log().bfloat16().exp().item()
    assert abs(rounded - scale) > 1e-3 * scale
    cosine = clip_score.score(clips, PROMPTS, 8.0)["cosine"]
    scores = pick_score.score(clips, PROMPTS, 8.0)["pickscore"]
    torch.testing.assert_close(scores, scale * cosine / 26)


def test_all_sampled_frames_count(folder, clips):
    reward = built(ClipScore, folder)
    assert [len(reward._pixels(clip, 8.0)) for clip in clips] == [4, 4, 6]

    def cosine(clip):
        return reward.score([clip], ["boat"], 8.0)["cosine"].item()

    frame_cosines = [cosine(clips[0][[i] * 4]) for i in (0, 5, 10, 15)]
    assert cosine(clips[0]) == pytest.approx(sum(frame_cosines) / 4, abs=1e-5)
    only_first = clips[0][[0] * 16]
    assert cosine(only_first) == pytest.approx(frame_cosines[0], abs=1e-5)


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "vocab.json"])
def test_an_incomplete_folder_is_named(folder, tmp_path, lost):
    for path in folder.iterdir():
        if path.name != lost:
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} has no .*{lost.rpartition('.')[2]}"):
        built(PickScore, tmp_path)


def test_a_folder_cannot_lead_elsewhere(folder, tmp_path):
    """Not by an adapter, an index or an attention that would be downloaded; torch files beside it are left alone."""
    copy = shutil.copytree(folder, tmp_path / "clip")
    change(
        copy / "config.json",
        attn_implementation="somebody/attention",
        auto_map={"AutoModel": "own.Own"},
    )
    write_bomb(copy / "pytorch_model.bin", tmp_path / "marker")
    assert built(ClipScore, copy).model.config._attn_implementation == "sdpa"
    (copy / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    with pytest.raises(ValueError, match="holds an adapter_config"):
        built(ClipScore, copy)
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.safetensors"}}')
    with pytest.raises(ValueError, match="is not a safetensors file beside it"):
        built(ClipScore, copy)
    assert not (tmp_path / "marker").exists()


def test_lost_weights_are_not_replaced_by_random_ones(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack visual_projection.weight"):
        built(ClipScore, tmp_path)
