"""Model folders: missing files are named, and sampling defaults come from the right place."""

import json
import shutil

import pytest

from sage_grpo.models.backbone import Sampling
from sage_grpo.models.hunyuan15.folder import DIFFUSERS_FILES, TENCENT_FOLDERS, ModelFolder
from sage_grpo.models.hunyuan15.image import ImageFolder
from sage_grpo.models.registry import open_backbone

GLYPH = "text_encoder/Glyph-SDXL-v2/checkpoints/byt5_model.safetensors"


def hub_folder(path, target_size, task_type, guidance=None):
    """The files of a hub folder that sampling defaults depend on."""
    (path / "transformer").mkdir()
    (path / "transformer" / "config.json").write_text(
        json.dumps({"target_size": target_size, "task_type": task_type})
    )
    (path / "transformer" / "model.safetensors").touch()
    if guidance is not None:
        (path / "guider").mkdir()
        (path / "guider" / "guider_config.json").write_text(
            json.dumps({"guidance_scale": guidance})
        )
    return path


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere' does not exist"):
        ModelFolder(tmp_path / "nowhere").part("vae")


@pytest.mark.parametrize("name", DIFFUSERS_FILES)
def test_missing_part_is_named(tiny_folder, tmp_path, name):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    assert ModelFolder(folder).part(name) == folder / name
    shutil.rmtree(folder / name)
    with pytest.raises(
        FileNotFoundError,
        match=f"^Model folder '.*' lacks {name}/.*; download_weights.sh gets what",
    ):
        ModelFolder(folder).part(name)


def test_part_without_weights_is_named(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks vae/\*\.safetensors; download_weights\.sh"):
        ModelFolder(folder).part("vae")


@pytest.mark.parametrize("place", ["transformer", "transformer/480p_t2v"])
def test_a_step_distilled_transformer_is_refused(tiny_folder, tencent_folder, tmp_path, place):
    original = tiny_folder if place == "transformer" else tencent_folder
    folder = shutil.copytree(original, tmp_path / "model")
    ModelFolder(folder).check()
    path = folder / place / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_meanflow": True}))
    message = r"config\.json has use_meanflow True: this step-distilled transformer"
    with pytest.raises(ValueError, match=message):
        ModelFolder(folder).check()
    with pytest.raises(ValueError, match=message):
        open_backbone(folder, complete=False).empty_transformer()


def test_layouts_are_told_apart(tiny_folder, tencent_folder, tmp_path):
    folders = (tiny_folder, tencent_folder, tmp_path)
    assert [ModelFolder(folder).is_tencent for folder in folders] == [False, True, False]
    (tmp_path / "text_encoder" / "llm").mkdir(parents=True)  # a download that has only begun
    assert ModelFolder(tmp_path).is_tencent


def test_parts_of_tencents_layout(tencent_i2v_folder):
    folder = ImageFolder(tencent_i2v_folder, "480p_i2v")
    assert folder.files.keys() == TENCENT_FOLDERS.keys()
    for name, place in TENCENT_FOLDERS.items():
        assert folder.part(name) == tencent_i2v_folder / place.format(version="480p_i2v")


def test_a_complete_folder_lacks_nothing(tiny_folder, tencent_folder):
    assert ModelFolder(tiny_folder).missing_files() == []
    assert ModelFolder(tencent_folder).missing_files() == []


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
    assert ModelFolder(folder).missing_files() == list(dict.fromkeys(missing))
    with pytest.raises(FileNotFoundError) as error:
        open_backbone(folder)
    assert str(error.value) == (
        f"Model folder '{folder}' lacks {', '.join(dict.fromkeys(missing))}; download_weights.sh gets what is missing, "
        f"and 'python scripts/convert_weights.py {folder}' makes byt5_model.safetensors from byt5_model.pt."
    )


def test_a_version_that_is_not_there_is_named_with_those_that_are(tencent_folder):
    message = "'.*/transformer' has no 720p_t2v; choose pretrained_transformer_version from 480p_t2v, or get it: .*"
    with pytest.raises(FileNotFoundError, match=message):
        open_backbone(tencent_folder, version="720p_t2v")


def test_a_version_means_nothing_in_the_layout_of_diffusers(tiny_folder):
    with pytest.raises(
        ValueError, match=r"pretrained_transformer_version 720p_t2v chooses .*; leave it out\.$"
    ):
        open_backbone(tiny_folder, version="720p_t2v")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("480p_t2v", Sampling(121, 480, 848, 24, 5.0, 6.0, 50)),
        ("720p_t2v", Sampling(121, 720, 1280, 24, 9.0, 6.0, 50)),
        ("480p_t2v_distilled", Sampling(121, 480, 848, 24, 5.0, 1.0, 50)),
        ("720p_t2v_cfg_distilled", Sampling(121, 720, 1280, 24, 9.0, 1.0, 50)),
    ],
)
def test_versions_of_tencents_layout_take_the_built_in_table(tmp_path, version, expected):
    folder = tmp_path / "transformer" / version
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    assert ModelFolder(tmp_path, version).sampling() == expected


def test_folder_with_its_own_sampling_file(tiny_folder):
    assert ModelFolder(tiny_folder).sampling() == Sampling(9, 32, 32, 8, 5.0, 6.0, 20)


@pytest.mark.parametrize(
    "version, guidance, expected",
    [
        ((640, "t2v"), None, Sampling(121, 480, 848, 24, 5.0, 6.0, 50)),
        ((640, "t2v"), 1.0, Sampling(121, 480, 848, 24, 5.0, 1.0, 50)),
        ((960, "t2v"), 6.0, Sampling(121, 720, 1280, 24, 9.0, 6.0, 50)),
    ],
)
def test_hub_folders_take_the_built_in_table(tmp_path, version, guidance, expected):
    assert ModelFolder(hub_folder(tmp_path, *version, guidance)).sampling() == expected


@pytest.mark.parametrize(
    "version, expected", [("480p_t2v", (81, 352, 624)), ("720p_t2v", (81, 720, 1280))]
)
def test_rollouts_are_those_of_the_published_training(tmp_path, version, expected):
    absent = open_backbone(tmp_path / "absent", version=version, complete=False)
    assert absent.rollout_size == expected


def test_other_models_roll_out_what_they_are_meant_for(tiny_folder):
    assert open_backbone(tiny_folder).rollout_size == (9, 32, 32)


@pytest.mark.parametrize("task_type", ["t2v", "i2v", None])
def test_the_pipeline_tells_the_task_and_the_transformer_does_not(tmp_path, task_type):
    """Published folders have a wrong `task_type`."""
    folder = hub_folder(tmp_path, 960, task_type)
    assert ModelFolder(folder).sampling().shift == 9.0
    assert ImageFolder(folder).sampling().shift == 7.0


def test_unknown_version_says_what_to_do(tmp_path):
    with pytest.raises(
        ValueError, match=r"target_size 1440, which is neither 640 nor 960; .*sampling\.json"
    ):
        ModelFolder(hub_folder(tmp_path, 1440, "t2v")).sampling()


def test_a_folder_that_does_not_exist_stands_for_the_published_model(tmp_path):
    absent = ModelFolder(tmp_path / "absent", "720p_t2v_distilled")
    assert absent.config("transformer") == absent.config("vae") == {}  # the defaults of diffusers
    assert absent.sampling() == Sampling(121, 720, 1280, 24, 9.0, 1.0, 50)
    with pytest.raises(
        ValueError, match="pretrained_transformer_version is 1080p_sr; it must be 480p_t2v, "
    ):
        ModelFolder(tmp_path / "absent", "1080p_sr").sampling()
    with pytest.raises(FileNotFoundError, match="absent' does not exist"):
        absent.weights("transformer")
