"""The pretraining script end to end, with a few steps of each stage on the CPU.

Slow: adds the whole program to the tests of its parts, test_learn_vae.py, test_training.py and test_tiny.py.
"""

import json
import shutil
import sys

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline
from PIL import Image
from safetensors.torch import load_file

from research.tiny import card as model_card
from research.tiny import learn_vae, pretrain
from sage_grpo.data.requests import read_requests
from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.worlds.shapes.scenes import render, sample_scenes

pytestmark = pytest.mark.slow
FEW = "--vae_steps 2 --vae_batch 2 --vae_clips 16 --clips 32 --prompts 8 --batch 4 --snapshots 2 --device cpu "
FEW += "--heads 4 --side 32 --vae_channels 16 32 32 --latents 16 --guidance 2"
RUNS = {
    "first": "--seed 0 --steps 3",
    "same": "--seed 0 --steps 3",
    "other": "--seed 1 --steps 3",
    "short": "--seed 0 --steps 2",
}


@pytest.fixture
def runs(made_once):
    """A folder per run."""
    return made_once("pretrain", pretrain_all)


def pretrain_all(root):
    """With fewer clips per batch, and weights averaged at every step."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (pretrain, learn_vae):
            patch.setattr(module, "ENCODED", 16)
        patch.setattr(pretrain, "EMA_EVERY", 1)
        patch.setattr(pretrain, "SHEET", {"prompts": 2, "steps": 2})
        for name, flags in RUNS.items():
            command = ["pretrain.py", "--output", str(root / name), *FEW.split(), *flags.split()]
            patch.setattr(sys, "argv", command)
            pretrain.main()
    torch.use_deterministic_algorithms(False)


def weights(folder, part="transformer"):
    return load_file(folder / part / "diffusion_pytorch_model.safetensors")


def test_everything_follows_from_the_seed(runs):
    for part in ("transformer", "vae"):
        first, same, other = (weights(runs / name, part) for name in ("first", "same", "other"))
        assert all(torch.equal(first[name], same[name]) for name in first)
        assert any(not torch.equal(first[name], other[name]) for name in first)


def test_training_moves_both_parts(runs):
    untrained = pretrain.build_tiny(0, pretrain.vocabulary())
    for part in ("transformer", "vae"):
        before = {
            name: value.half() for name, value in getattr(untrained, part).state_dict().items()
        }
        after = {name: value.half() for name, value in weights(runs / "first", part).items()}
        assert set(before) == set(after) and any(
            not torch.equal(before[name], after[name]) for name in before
        )


def test_half_of_the_weights_are_stored_in_8_bits_and_all_others_in_16(runs):
    stored = weights(runs / "first")
    (small,) = [name for name, value in stored.items() if value.dtype == torch.float8_e4m3fn]
    assert small == "context_embedder_2.linear_2.weight"
    assert all(value.dtype == torch.float16 for name, value in stored.items() if name != small)


def test_a_shorter_run_is_a_prefix(runs):
    snapshot, short = weights(runs / "first-2"), weights(runs / "short")
    assert all(torch.equal(snapshot[name], short[name]) for name in short)
    assert any(
        not torch.equal(snapshot[name], value) for name, value in weights(runs / "first").items()
    )


def test_the_folder_loads_in_the_stock_pipeline_and_in_ours(runs):
    stock, ours = HunyuanVideo15Pipeline.from_pretrained(runs / "first"), Hunyuan15(runs / "first")
    assert stock.vae.config.scaling_factor == ours.vae.config.scaling_factor != 1.03682
    assert json.loads((runs / "first" / "world.json").read_text()) == {"world": "shapes"}
    latents = ours.encode_video(pretrain_clip())
    assert 0.2 < latents.std() < 5  # scaled to about one


def test_the_folder_brings_its_prompts_and_its_history(runs):
    train, valid = (
        read_requests(runs / "first" / f"prompts_{name}.txt") for name in ("train", "valid")
    )
    assert (len(train), len(valid)) == (512, 64)
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in valid}
    record = json.loads((runs / "first-2" / "training.json").read_text())
    assert (
        "--steps 2 --heads 4 --guidance 2.0 --side 32 --vae_channels 16 32 32 --latents 16 "
        in record["command"]
    )
    assert record["command"].endswith(
        "--vae_clips 16 --vae_steps 2 --vae_batch 2 --clips 32 --prompts 8 --batch 4"
    )
    assert record["flags"]["seed"] == "0" and record["device"] == "CPU"


def test_every_folder_shows_samples(runs):
    for name in ("first", "first-2", "short"):
        with Image.open(runs / name / "samples.png") as sheet:
            assert sheet.size == (532, 274)  # two rows of five frames with their labels and margins


def test_the_card_is_made_of_measured_figures(runs, tmp_path):
    folder = shutil.copytree(runs / "first", tmp_path / "first")
    flags = ("--prompts", "2", "--device", "cpu", "--card")
    model_card.main(["--model_path", str(folder), "--output", str(tmp_path), *flags])
    card, rows = (
        (folder / "README.md").read_text(),
        json.loads((folder / "quality.json").read_text()),
    )
    assert set(rows) == {"chance", "VAE round trip", "guidance 1", "guidance 2"}
    assert (
        f"{rows['VAE round trip']['distance']:.3f}" in card
        and "One clip for each of 2 random prompts" in card
    )
    assert (
        "--latents 16 --vae_clips 16 --vae_steps 2" in card
        and "`HunyuanVideo15Transformer3DModel` | 4 layers, 4 heads of 24" in card
    )
    sheets = {"world", "round_trip", "samples_guidance_1", "samples_guidance_2", "samplers"}
    assert {path.stem for path in tmp_path.glob("*.png")} == sheets


def pretrain_clip():
    scenes = sample_scenes(1, torch.Generator().manual_seed(0))
    return (render(scenes, 9, 32, 32) * 255).round().to(torch.uint8)
