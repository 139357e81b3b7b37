"""Adapters: which layers have them, what they change, and which files are loaded or refused."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sage_grpo.data.requests import Request
from sage_grpo.files.tensor_files import write_file
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.models.hunyuan15.folder import ModelFolder
from sage_grpo.models.lora import (
    LORA_FILE,
    LORA_FILES,
    POLICY,
    PREFIX,
    adapter_file,
    adapter_parameters,
    add_adapter,
    init_adapter,
    load_adapter,
    target_layers,
)
from scripts.export_checkpoint import merged

NAMES = ("to_q", "add_q_proj", "to_add_out")


@pytest.fixture
def backbone(tiny_folder):
    return Hunyuan15(tiny_folder)


def add(backbone, seed=0):
    add_adapter(backbone.transformer, 4, 8, NAMES, torch.float32)
    init_adapter(backbone.transformer, seed)


def velocity(backbone):
    x = torch.randn(
        1, *backbone.latent_shape(5, 32, 32), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        return backbone.velocity(x, 0.5, backbone.encode([Request("a red circle")])[0], Guidance())


def test_layers_are_those_of_the_blocks_that_matter(backbone):
    assert target_layers(backbone.transformer, NAMES) == [
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.attn.add_q_proj",
        "transformer_blocks.0.attn.to_add_out",
        "transformer_blocks.1.attn.to_q",  # the context that leaves the last block is not read
    ]
    with pytest.raises(ValueError, match=r"names to_z; linear layers of the blocks are .*to_q"):
        target_layers(backbone.transformer, ["to_q", "to_z"])


def test_a_new_adapter_changes_nothing_and_follows_from_the_seed(backbone, tiny_folder):
    before = velocity(backbone)
    add(backbone)
    torch.testing.assert_close(velocity(backbone), before)

    same_seed = Hunyuan15(tiny_folder)
    add(same_seed, seed=0)
    other_seed = Hunyuan15(tiny_folder)
    add(other_seed, seed=1)
    first, same, different = (
        adapter_parameters(model.transformer) for model in (backbone, same_seed, other_seed)
    )
    name = next(name for name in first if "lora_A" in name)
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], different[name])


def test_an_adapter_adds_its_product_scaled_by_alpha_over_rank(backbone):
    layer_name = "transformer_blocks.0.attn.to_q"
    layer = backbone.transformer.get_submodule(layer_name)
    x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
    before = layer(x)
    add(backbone)  # rank 4, alpha 8
    parameters = adapter_parameters(backbone.transformer)
    down = parameters[f"{layer_name}.lora_A.weight"]
    up = parameters[f"{layer_name}.lora_B.weight"]
    up.data.fill_(0.1)
    after = backbone.transformer.get_submodule(layer_name)(x)
    torch.testing.assert_close(after, before + 8 / 4 * x @ down.T @ up.T)


def test_an_adapter_has_its_own_precision_and_leaves_other_draws_alone(backbone):
    transformer = backbone.transformer
    state = torch.get_rng_state()
    add_adapter(transformer, 4, 8, NAMES, torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), state)
    assert {p.dtype for p in adapter_parameters(transformer).values()} == {torch.bfloat16}
    assert transformer.transformer_blocks[0].attn.to_q.base_layer.weight.dtype == torch.float32


def contents(file):
    """Settings and tensors of an adapter's file, without the prefix that pipelines give them.

    The order of the target modules does not matter.
    """
    with safe_open(file, "pt") as handle:
        settings = json.loads(handle.metadata()["lora_adapter_metadata"])
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - it is no dict
    settings = {name.removeprefix(PREFIX): value for name, value in settings.items()}
    settings["target_modules"] = sorted(settings["target_modules"])
    return settings, {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def test_a_saved_adapter_is_loaded_or_refused(backbone, tiny_folder, tmp_path):
    add(backbone)
    for parameter in adapter_parameters(backbone.transformer).values():
        parameter.data += 0.1
    write_file(tmp_path / LORA_FILE, adapter_file(backbone.transformer))
    backbone.transformer.save_lora_adapter(
        tmp_path / "stock", adapter_name=POLICY, weight_name=LORA_FILE
    )
    settings, tensors = contents(tmp_path / LORA_FILE)
    stock_settings, stock_tensors = contents(tmp_path / "stock" / LORA_FILE)
    assert settings == stock_settings and tensors.keys() == stock_tensors.keys()
    assert all(torch.equal(value, stock_tensors[name]) for name, value in tensors.items())

    other = Hunyuan15(tiny_folder)
    add(other)
    load_adapter(other.transformer, tmp_path)
    assert torch.equal(velocity(other), velocity(backbone))
    wider = Hunyuan15(tiny_folder)
    add_adapter(wider.transformer, 8, 8, NAMES, torch.float32)
    with pytest.raises(ValueError, match="does not fit lora_r"):
        load_adapter(wider.transformer, tmp_path)

    # lora_experts would be refused, too
    shutil.copy(tmp_path / LORA_FILE, tmp_path / LORA_FILES["transformer_2"])
    with pytest.raises(ValueError, match="transformer and transformer_2, but this run") as caught:
        load_adapter(other.transformer, tmp_path)
    assert "lora_experts" not in str(caught.value)


def test_stock_diffusers_loads_it_into_the_transformer_of_a_pipeline(
    backbone, tiny_folder, tmp_path
):
    add(backbone)
    for parameter in adapter_parameters(backbone.transformer).values():
        parameter.data += 0.1
    save(backbone, tmp_path)
    stock = Hunyuan15(tiny_folder)
    plain = velocity(stock)
    # by default it expects the prefix of pipelines
    stock.transformer.load_lora_adapter(tmp_path, weight_name=LORA_FILE)
    assert torch.equal(velocity(stock), velocity(backbone))
    assert not torch.equal(velocity(stock), plain)


def save(backbone, folder):
    write_file(folder / LORA_FILE, adapter_file(backbone.transformer))


def rewrite(folder, tensors=None, **settings):
    """Change a saved adapter: tensors by name, settings by name (None removes one)."""
    old_settings, old_tensors = contents(folder / LORA_FILE)
    changed = old_settings | settings
    changed = {name: value for name, value in changed.items() if value is not None}
    metadata = {"lora_adapter_metadata": json.dumps(changed)}
    save_file(old_tensors | (tensors or {}), folder / LORA_FILE, metadata)


def assert_one_sentence(error, file):
    assert str(error).startswith(f"{file} ") and len(str(error).splitlines()) == 1


@pytest.mark.parametrize("settings, words", [
    ({"lora_alpha": 16}, "has lora_alpha 16, but lora_r and lora_alpha make it 8"),
    ({"use_rslora": True}, "has use_rslora True"),
    ({"alpha_pattern": {"transformer_blocks.0.attn.to_q": 1}}, "its settings name 'alpha_pattern'"),
    ({"rank_pattern": {"transformer_blocks.0.attn.to_q": 2}}, "its settings name 'rank_pattern'"),
    ({"r": 2}, "has r 2, but tensors of rank 4"),
])  # fmt: skip
def test_an_adapter_of_another_scale_is_refused(backbone, tmp_path, settings, words):
    add(backbone)
    save(backbone, tmp_path)
    load_adapter(backbone.transformer, tmp_path)
    rewrite(tmp_path, **settings)
    with pytest.raises(ValueError, match=words):
        load_adapter(backbone.transformer, tmp_path)


def test_an_adapter_without_settings_has_scale_1_as_in_diffusers(backbone, tiny_folder, tmp_path):
    add(backbone)
    save(backbone, tmp_path)
    tensors = load_file(tmp_path / LORA_FILE)
    save_file(tensors, tmp_path / LORA_FILE)
    with pytest.raises(ValueError, match="has lora_alpha 4, but lora_r and lora_alpha make it 8"):
        load_adapter(backbone.transformer, tmp_path)
    other = Hunyuan15(tiny_folder)
    add_adapter(other.transformer, 4, 4, NAMES, torch.float32)
    load_adapter(other.transformer, tmp_path)


SLOW = "(a+)+" * 20 + "b"  # a regular expression that takes forever
LAYER = "transformer_blocks.0.attn.to_q"


@pytest.mark.parametrize("settings", [
    {"rank_pattern": {SLOW: 4}}, {"alpha_pattern": {SLOW: 4}}, {"alpha_pattern": [1]},
    {"alpha_pattern": {LAYER: "x"}}, {"rank_pattern": {LAYER: -1}}, {"rank_pattern": 3}, {"r": 2**40}, {"r": 0},
    {"r": "4"}, {"r": 2**30}, {"rank_pattern": {LAYER: 2**30}}, {"lora_alpha": 1e308}, {"lora_alpha": None, "r": 1.5},
    {"use_rslora": 1},
], ids=str)  # fmt: skip
def test_a_hostile_setting_is_refused_before_peft_sees_it(backbone, tmp_path, settings):
    add(backbone)
    save(backbone, tmp_path)
    rewrite(tmp_path, **settings)
    with pytest.raises(ValueError) as caught:
        backbone.load_weights(tmp_path)
    assert_one_sentence(caught.value, tmp_path / LORA_FILE)


@pytest.mark.parametrize("layers", [SLOW, [SLOW], ".*", [1], None, "", {}], ids=str)
def test_only_the_tensors_say_which_layers_have_an_adapter(backbone, tiny_folder, tmp_path, layers):
    add(backbone)
    save(backbone, tmp_path)
    rewrite(tmp_path, target_modules=layers)
    other = Hunyuan15(tiny_folder)
    other.load_weights(tmp_path)
    torch.testing.assert_close(velocity(other), velocity(backbone))


@pytest.mark.parametrize("tensors", [
    {f"{SLOW}.lora_A.weight": torch.zeros(2, 2), f"{SLOW}.lora_B.weight": torch.zeros(2, 2)},
    {f"{LAYER}.lora_A.weight": torch.zeros(4, 3)}, {f"{LAYER}.lora_B.weight": torch.zeros(3, 4)},
    {f"{LAYER}.lora_A.weight": torch.zeros(5, 64)}, {f"{LAYER}.lora_A.weight": torch.zeros(())},
    {f"{LAYER}.lora_A.weight": torch.zeros(0, 64)}, {f"{LAYER}.lora_A.weight": torch.zeros(4, 64, 1)},
    {"nowhere.lora_A.weight": torch.zeros(4, 64), "nowhere.lora_B.weight": torch.zeros(64, 4)},
    {f"{LAYER}.lora_magnitude_vector": torch.zeros(4)}, {"x": torch.zeros(1)},
], ids=lambda tensors: next(iter(tensors))[-30:])  # fmt: skip
@pytest.mark.parametrize("has_settings", [True, False], ids=["settings", "no settings"])
def test_an_adapter_with_other_tensors_is_refused_in_one_sentence(
    backbone, tmp_path, tensors, has_settings
):
    add(backbone)
    save(backbone, tmp_path)
    rewrite(tmp_path, tensors)
    if not has_settings:
        save_file(load_file(tmp_path / LORA_FILE), tmp_path / LORA_FILE)
    with pytest.raises(ValueError) as caught:
        load_adapter(backbone.transformer, tmp_path)
    assert_one_sentence(caught.value, tmp_path / LORA_FILE)
    with pytest.raises(ValueError) as caught:
        backbone.load_weights(tmp_path)
    assert_one_sentence(caught.value, tmp_path / LORA_FILE)


def test_a_merged_adapter_is_the_adapter(backbone, tiny_folder, tmp_path):
    add(backbone)
    for parameter in adapter_parameters(backbone.transformer).values():
        parameter.data += 0.1
    write_file(tmp_path / LORA_FILE, adapter_file(backbone.transformer))
    base = ModelFolder(tiny_folder).weights("transformer")
    plain = Hunyuan15(tiny_folder)
    tensors = dict(merged(base, tmp_path / LORA_FILE))
    changed = {name for name, value in tensors.items() if not torch.equal(value, base.read(name))}
    assert changed == {f"{layer}.weight" for layer in target_layers(plain.transformer, NAMES)}
    plain.transformer.load_state_dict(tensors)
    torch.testing.assert_close(velocity(plain), velocity(backbone), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="does not fit"):
        dict(merged(ModelFolder(tiny_folder).weights("vae"), tmp_path / LORA_FILE))
