"""A wrong value in a model's configuration is refused in one sentence that names the file, whichever the layout."""

import json
import os
import shutil

import pytest
import torch

from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.models.hunyuan15.folder import ModelFolder
from sage_grpo.models.hunyuan15.text import load_encoders, load_tokenizers
from tests.smallest_run import slow

LARGE = 2**62
ANY = (None, "x", [], {}, -1, LARGE, 1e308, 0.5, [[1]])


def build_transformer(folder):
    backbone = Hunyuan15(folder)
    return backbone.empty_transformer(), backbone.architecture()


def build_encoders(folder):
    return load_encoders(ModelFolder(folder), torch.device("cpu"), torch.float32)


def build_vae(folder):
    backbone = Hunyuan15(folder)
    return backbone.vae, backbone.latent_shape(5, 32, 32)


@pytest.fixture
def copied(request, tmp_path):
    """copied(layout) -> a model folder in that layout which may be changed."""

    def copy(layout):
        return shutil.copytree(request.getfixturevalue(f"{layout}_folder"), tmp_path / "model")

    return copy


CONFIGS = {
    ("tiny", "transformer/config.json"): build_transformer,
    ("tiny", "vae/config.json"): build_vae,
    ("tiny", "text_encoder/config.json"): build_encoders,
    ("tiny", "text_encoder_2/config.json"): build_encoders,
    ("tencent", "transformer/480p_t2v/config.json"): build_transformer,
    ("tencent", "vae/config.json"): build_vae,
    ("tencent", "text_encoder/llm/config.json"): build_encoders,
}


@pytest.mark.parametrize(
    "layout, name", [key if key == ("tiny", "vae/config.json") else slow(*key) for key in CONFIGS]
)
def test_every_key_of_every_configuration(copied, layout, name):
    """Slow: configurations whose models take longer to build than the VAE."""
    folder = copied(layout)
    good = json.loads((folder / name).read_text())
    refused = 0
    for number, key in enumerate(good):
        for value in (*ANY[number % 3 :: 3], None):  # a third of them, and none at all
            values = good | {key: value}
            if value is None:
                del values[key]
            (folder / name).write_text(json.dumps(values))
            try:
                CONFIGS[layout, name](folder)
            except (ValueError, FileNotFoundError) as error:
                assert str(folder) in str(error) and len(str(error).splitlines()) == 1, (key, value)
                refused += 1
    assert refused > len(good)


@pytest.mark.parametrize("name, key, value, words", [
    ("transformer/config.json", "num_layers", "2", "config.json has num_layers '2'; it must be a whole number above 0"),
    ("transformer/config.json", "num_layers", 10**6, "config.json has 'num_layers' 1000000, but no model has 1000"),
    ("transformer/config.json", "num_refiner_layers", LARGE, "but no model has 1000"),
    ("transformer/config.json", "in_channels", LARGE, "but no model has 2147483648"),
    ("transformer/config.json", "rope_axes_dim", [4, 6, 8], "whose sum must be attention_head_dim, 16"),
    ("transformer/config.json", "rope_axes_dim", [], "it must be a list of whole numbers above 0"),
    ("transformer/config.json", "qk_norm", "x", r"config.json cannot be used \(ValueError: "),
    ("vae/config.json", "spatial_compression_ratio", 0, "it must be a whole number above 0"),
    ("vae/config.json", "spatial_compression_ratio", 6, "compresses time by 4 and space by 6"),
    ("vae/config.json", "temporal_compression_ratio", 8, "compresses time by 8 and space by 4"),
    ("vae/config.json", "scaling_factor", 0, "has scaling_factor 0; it must be a number above 0"),
])  # fmt: skip
def test_the_key_is_named(copied, name, key, value, words):
    folder = copied("tiny")
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | {key: value}))
    with pytest.raises(ValueError, match=words):
        CONFIGS["tiny", name](folder)


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2"])
def test_layers_without_end_are_not_built(copied, part):
    folder = copied("tiny")
    for key in ("num_hidden_layers", "num_layers"):
        values = json.loads((folder / part / "config.json").read_text()) | {key: LARGE}
        (folder / part / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        ValueError,
        match=rf"{part}/config\.json has 'num_(hidden_)?layers' .*, but no model has 1000",
    ):
        build_encoders(folder)


@pytest.mark.parametrize("part", ["tokenizer", "tokenizer_2"])
@pytest.mark.parametrize(
    "content", ['{"added_tokens_decoder": {"x": 3}}', '{"extra_special_tokens": 3}', "[]", "{"]
)
def test_a_damaged_tokenizer_is_named(copied, part, content):
    folder = copied("tiny")
    (folder / part / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"{part}/tokenizer_config\.json cannot be used"):
        load_tokenizers(ModelFolder(folder))


@pytest.mark.parametrize(
    "name", ["transformer/config.json", "vae/diffusion_pytorch_model.safetensors"]
)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(copied, name):
    folder = copied("tiny")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    build = build_vae if name.startswith("vae") else build_transformer
    with pytest.raises((ValueError, FileNotFoundError), match=name.rpartition("/")[2]):
        build(folder)


def test_a_clip_beyond_all_memory_is_refused(tiny_folder):
    with pytest.raises(ValueError, match="latent positions, and no machine holds 16777216"):
        Hunyuan15(tiny_folder).latent_shape(4 * 2**20 + 1, 32, 32)
