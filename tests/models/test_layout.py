"""Model folders: what is missing is named, and sampling defaults come from the right place."""

import json
import shutil

import pytest

from sage_grpo.models.layout import CONFIG_FILES, component, sampling_defaults
from sage_grpo.models.policy import Sampling


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


@pytest.mark.parametrize("name", CONFIG_FILES)
def test_missing_part_is_named(tiny_folder, tmp_path, name):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    assert component(folder, name) == folder / name
    shutil.rmtree(folder / name)
    with pytest.raises(FileNotFoundError, match=f"has no '{name}/"):
        component(folder, name)


def test_part_without_weights_is_named(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="vae' has a config but no weights"):
        component(folder, "vae")


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
    with pytest.raises(ValueError, match=r"640 i2v.*sampling\.json"):
        sampling_defaults(hub_folder(tmp_path, 640, "i2v"))
