"""Wan folders: what is missing or odd is named in one sentence."""

import json
import shutil

import pytest
import torch

from sage_grpo.data.requests import Request
from sage_grpo.models.registry import open_backbone
from sage_grpo.models.wan.backbone import Wan
from sage_grpo.models.wan.folder import WanFolder
from tests.smallest_run import slow

ANY = (None, "x", [], {}, -1, 2**62, 1e308, 0.5, [[1]], 0)


@pytest.fixture
def folder(wan_folder, tmp_path):
    """A model folder that may be changed."""
    return shutil.copytree(wan_folder, tmp_path / "model")


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_index_chooses_the_backbone(wan_folder):
    backbone = open_backbone(wan_folder)
    assert isinstance(backbone, Wan)
    assert str(backbone.sampling).startswith("9 frames of 32 x 32, 20 steps, shift 3")


@pytest.mark.parametrize(
    "version, height, shift", [("480p_t2v", 480, 3.0), ("720p_t2v", 720, 5.0), (None, 480, 3.0)]
)
def test_a_folder_is_sampled_as_its_version_says(folder, version, height, shift):
    (folder / "sampling.json").unlink()
    sampling = open_backbone(folder, version=version).sampling
    assert (sampling.frames, sampling.fps) == (81, 16)
    assert (sampling.height, sampling.shift) == (height, shift)


def test_an_unknown_version_is_named_with_those_that_are_known(tmp_path):
    with pytest.raises(
        ValueError, match=r"version is 'wan3'; for Wan choose from 480p_t2v, .*wan21-14b"
    ):
        open_backbone(tmp_path / "absent", version="wan3", complete=False).architecture()


@pytest.mark.parametrize("name", WanFolder.files)
def test_a_missing_part_is_named(folder, name):
    shutil.rmtree(folder / name)
    with pytest.raises(
        FileNotFoundError,
        match=f"^Model folder '.*' lacks {name}/.*; download_weights.sh gets what",
    ):
        open_backbone(folder)


@pytest.mark.parametrize("name, values, words", [
    ("model_index.json", {"boundary_ratio": 0.875, "expand_timesteps": True}, "boundary_ratio, unlike Wan 2.2 TI2V"),
    ("transformer/config.json", {"image_dim": 1280}, "is of an image-to-video transformer"),
    ("transformer/config.json", {"patch_size": [1, 4, 4]}, r"has patch_size \[1, 4, 4\], unlike Wan 2.1"),
    ("transformer/config.json", {"num_layers": 10**6}, "'num_layers' 1000000, but no model has 1000"),
    ("vae/config.json", {"patch_size": 2}, "has patch_size 2, unlike Wan 2.1"),
    ("vae/config.json", {"latents_mean": [0.0]}, "has latents_mean .* it must be a list of 4 numbers"),
    ("vae/config.json", {"latents_std": [1.0, 1.0, 0.0, 1.0]}, "must be a list of 4 numbers, not 0"),
    ("vae/config.json", {"z_dim": 0}, "has z_dim 0; it must be a whole number above 0"),
])  # fmt: skip
def test_an_odd_folder_is_refused_in_a_sentence(folder, name, values, words):
    change(folder / name, **values)
    with pytest.raises(ValueError, match=words) as error:
        open_backbone(folder).architecture()
    assert str(folder / name) in str(error.value) and len(str(error.value).splitlines()) == 1


def build(folder, part):
    backbone = Wan(folder)
    if part == "text_encoder":
        return backbone.encode([Request("a red circle")])
    if part == "transformer":
        return backbone.empty_transformer(), backbone.architecture()
    return backbone.vae


@pytest.mark.parametrize("part", ["transformer", "vae", slow("text_encoder")])
def test_every_key_of_every_configuration(folder, part):
    """Slow: the text encoder, which takes longer to build."""
    path = folder / part / "config.json"
    good = json.loads(path.read_text())
    refused = 0
    for number, key in enumerate(good):
        for value in ANY[number % 3 :: 3]:
            path.write_text(json.dumps(good | {key: value}))
            try:
                build(folder, part)
            except (ValueError, FileNotFoundError) as error:
                assert str(folder) in str(error) and len(str(error).splitlines()) == 1, (key, value)
                refused += 1
    assert refused > len(good)


def test_the_prompt_is_cut_where_the_stock_pipeline_cuts_it(wan_folder):
    backbone = Wan(wan_folder)
    [cond] = backbone.encode([Request("red " * 700)])
    assert cond.text.shape == (512, 24) and backbone.num_tokens(cond) == backbone.max_tokens == 512


def test_identity_depends_on_tokenizer_and_precision(wan_folder, folder):
    original = Wan(folder).encoder().identity()
    assert original == Wan(wan_folder).encoder().identity()
    assert original != Wan(folder, dtype=torch.bfloat16).encoder().identity()
    change(folder / "tokenizer" / "tokenizer_config.json", unk_token="<unk> ")
    assert original != Wan(folder).encoder().identity()
