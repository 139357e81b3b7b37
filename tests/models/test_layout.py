"""Model folders: what is missing is named, and sampling defaults come from the right place."""

import json
import shutil

import pytest

from sage_grpo.models.hunyuan15 import Hunyuan15
from sage_grpo.models.layout import (
    DIFFUSERS_FILES,
    TENCENT_FOLDERS,
    component,
    is_tencent,
    missing_files,
    sampling_defaults,
)
from sage_grpo.models.policy import Sampling

GLYPH = "text_encoder/Glyph-SDXL-v2/checkpoints/byt5_model.safetensors"


def hub_folder(path, target_size, task_type, guidance=None):
    """The files of a hub folder that sampling defaults depend on."""
    (path / "transformer").mkdir()
    (path / "transformer" / "config.json").write_text(json.dumps({"target_size": target_size, "task_type": task_type}))
    (path / "transformer" / "model.safetensors").touch()
    if guidance is not None:
        (path / "guider").mkdir()
        (path / "guider" / "guider_config.json").write_text(json.dumps({"guidance_scale": guidance}))
    return path


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere' does not exist"):
        component(tmp_path / "nowhere", "vae")


@pytest.mark.parametrize("name", DIFFUSERS_FILES)
def test_missing_part_is_named(tiny_folder, tmp_path, name):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    assert component(folder, name) == folder / name
    shutil.rmtree(folder / name)
    with pytest.raises(FileNotFoundError, match=f"^Model folder '.*' lacks {name}/.*; download_weights.sh gets what"):
        component(folder, name)


def test_part_without_weights_is_named(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks vae/\*\.safetensors; download_weights\.sh"):
        component(folder, "vae")


def test_layouts_are_told_apart(tiny_folder, tencent_folder, tmp_path):
    assert not is_tencent(tiny_folder) and is_tencent(tencent_folder) and not is_tencent(tmp_path)
    (tmp_path / "text_encoder" / "llm").mkdir(parents=True)  # a download that has only begun
    assert is_tencent(tmp_path)


def test_parts_of_tencents_layout(tencent_folder):
    for name, place in TENCENT_FOLDERS.items():
        assert component(tencent_folder, name) == tencent_folder / place.format(version="480p_t2v")


def test_a_complete_folder_lacks_nothing(tiny_folder, tencent_folder):
    assert missing_files(tiny_folder) == missing_files(tencent_folder) == []


def test_everything_that_is_missing_is_listed_at_once(tencent_folder, tmp_path):
    folder = shutil.copytree(tencent_folder, tmp_path / "ckpts")
    shutil.rmtree(folder / "vae")
    (folder / "text_encoder" / "llm" / "tokenizer_config.json").unlink()
    (folder / "text_encoder" / "byt5-small" / "config.json").unlink()
    (folder / GLYPH).unlink()
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "text_encoder" / "llm" / "model.safetensors.index.json").write_text(json.dumps(index))
    missing = [
        "vae/config.json",
        "vae/*.safetensors",
        "text_encoder/llm/model-2.safetensors",
        GLYPH,
        "text_encoder/llm/tokenizer_config.json",
        "text_encoder/llm/model-2.safetensors",
        "text_encoder/byt5-small/config.json",
    ]
    assert missing_files(folder) == list(dict.fromkeys(missing))
    with pytest.raises(FileNotFoundError) as error:
        Hunyuan15(folder)
    assert str(error.value) == (
        f"Model folder '{folder}' lacks {', '.join(dict.fromkeys(missing))}; download_weights.sh gets what is missing, "
        f"and 'python scripts/convert_weights.py {folder}' makes byt5_model.safetensors of byt5_model.pt."
    )


def test_a_version_that_is_not_there_is_named_with_those_that_are(tencent_folder):
    message = "'.*/transformer' has no 720p_t2v; choose pretrained_transformer_version of 480p_t2v, or get it: .*"
    with pytest.raises(FileNotFoundError, match=message):
        Hunyuan15(tencent_folder, version="720p_t2v")


def test_a_version_means_nothing_in_the_layout_of_diffusers(tiny_folder):
    with pytest.raises(ValueError, match=r"pretrained_transformer_version 720p_t2v chooses .*; leave it out\.$"):
        Hunyuan15(tiny_folder, version="720p_t2v")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("480p_t2v", Sampling(81, 352, 624, 24, 5.0, 6.0, 20)),
        ("720p_t2v", Sampling(81, 720, 1280, 24, 9.0, 6.0, 20)),
        ("480p_t2v_distilled", Sampling(81, 352, 624, 24, 5.0, 1.0, 20)),
        ("720p_t2v_cfg_distilled", Sampling(81, 720, 1280, 24, 9.0, 1.0, 20)),
    ],
)
def test_versions_of_tencents_layout_take_the_built_in_table(tmp_path, version, expected):
    folder = tmp_path / "transformer" / version
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    assert sampling_defaults(tmp_path, version) == expected


def test_folder_with_its_own_sampling_file(tiny_folder):
    assert sampling_defaults(tiny_folder) == Sampling(9, 32, 32, 8, 5.0, 6.0, 20)


@pytest.mark.parametrize(
    "version, guidance, expected",
    [
        ((640, "t2v"), None, Sampling(81, 352, 624, 24, 5.0, 6.0, 20)),
        ((640, "t2v"), 1.0, Sampling(81, 352, 624, 24, 5.0, 1.0, 20)),
        ((960, "t2v"), 6.0, Sampling(81, 720, 1280, 24, 9.0, 6.0, 20)),
    ],
)
def test_hub_folders_take_the_built_in_table(tmp_path, version, guidance, expected):
    assert sampling_defaults(hub_folder(tmp_path, *version, guidance)) == expected


def test_unknown_version_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"640 'i2v'.*sampling\.json"):
        sampling_defaults(hub_folder(tmp_path, 640, "i2v"))
