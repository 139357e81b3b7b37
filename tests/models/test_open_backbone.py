"""The model folder determines which backbone is opened; an incomplete one is rejected unless only sizes are needed."""

import json
import shutil

import pytest

from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.models.registry import BACKBONES, open_backbone


def named(folder, name):
    """A model folder whose model_index.json names a pipeline."""
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": name}))
    return folder


def test_the_pipeline_that_the_folder_names_chooses_the_class(
    tiny_folder, tencent_folder, tmp_path, monkeypatch
):
    index = json.loads((tiny_folder / "model_index.json").read_text())
    assert index["_class_name"] == "HunyuanVideo15Pipeline"
    assert isinstance(open_backbone(tiny_folder), Hunyuan15)
    assert isinstance(open_backbone(tencent_folder), Hunyuan15)  # it names none
    opened = []

    class Other:
        def __init__(self, *args, **kwargs):
            opened.append((args, kwargs))

        def check(self):
            opened.append("checked")

    monkeypatch.setitem(BACKBONES, "OtherPipeline", Other)
    folder = named(tmp_path / "other", "OtherPipeline")
    assert isinstance(open_backbone(folder, "meta", version="v2"), Other)
    assert opened == [((folder, "meta"), {"version": "v2"}), "checked"]
    open_backbone(folder, complete=False)
    assert opened[2:] == [((folder,), {"version": None})]


@pytest.mark.parametrize(
    "name", ["FluxPipeline", "os:system", "sage_grpo.models.lora:merged", None, 7, ["x"]]
)
def test_a_folder_cannot_name_other_code(tmp_path, name):
    message = (
        r"model_index\.json names .* choose one of HunyuanVideo15Pipeline, .*, WanPipeline, .*"
    )
    with pytest.raises(ValueError, match=message):
        open_backbone(named(tmp_path / "other", name))


def test_a_folder_with_a_vision_model_serves_both_tasks(i2v_folder, tiny_folder, tmp_path):
    folder = shutil.copytree(i2v_folder, tmp_path / "both")
    shutil.copy(tiny_folder / "model_index.json", folder)
    assert not open_backbone(folder).sees_image
    both = open_backbone(folder, version="i2v")
    assert both.sees_image and both.architecture().image == 9
    with pytest.raises(
        FileNotFoundError, match=r"lacks image_encoder/config\.json, .*, feature_extractor/"
    ):
        open_backbone(tiny_folder, version="i2v")


def test_an_incomplete_folder_is_refused_before_anything_is_loaded(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    shutil.rmtree(folder / "text_encoder")
    with pytest.raises(
        FileNotFoundError, match=r"lacks text_encoder/config\.json, text_encoder/\*\.safetensors;"
    ):
        open_backbone(folder)
    assert open_backbone(folder, complete=False).sampling.frames == 9


def test_sizes_are_known_without_a_folder(tmp_path):
    backbone = open_backbone(tmp_path / "absent", version="720p_t2v", complete=False)
    assert (backbone.sampling.height, backbone.sampling.shift) == (720, 9.0)
    assert 8.3e9 < backbone.architecture().parameters < 8.4e9
    animating = open_backbone(tmp_path / "absent", version="480p_i2v", complete=False)
    assert animating.architecture().image == 729
    wan = open_backbone(tmp_path / "absent", version="wan21-1.3b", complete=False)
    assert 1.4e9 < wan.architecture().parameters < 1.5e9
