"""Adapters: which layers have them, what they change, and that the two are independent."""

import json

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
    found = target_layers(backbone.transformer, NAMES)
    assert found == [
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
    others = [Hunyuan15(tiny_folder) for _ in range(2)]
    for other, seed in zip(others, (0, 1), strict=True):
        add(other, seed=seed)
    mine, same, different = (adapter_parameters(p.transformer) for p in (backbone, *others))
    name = next(name for name in mine if "lora_A" in name)
    assert torch.equal(mine[name], same[name]) and not torch.equal(mine[name], different[name])


def test_an_adapter_adds_its_product_scaled_by_alpha_over_rank(backbone):
    layer_name = "transformer_blocks.0.attn.to_q"
    layer = backbone.transformer.get_submodule(layer_name)
    x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
    before = layer(x)
    add(backbone)  # rank 4, alpha 8
    mine = adapter_parameters(backbone.transformer)
    down, up = (mine[f"{layer_name}.lora_{part}.weight"] for part in "AB")
    up.data.fill_(0.1)
    torch.testing.assert_close(
        backbone.transformer.get_submodule(layer_name)(x), before + 8 / 4 * x @ down.T @ up.T
    )


def test_an_adapter_has_its_own_precision_and_leaves_other_draws_alone(backbone):
    transformer, state = backbone.transformer, torch.get_rng_state()
    add_adapter(transformer, 4, 8, NAMES, torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), state)
    assert {p.dtype for p in adapter_parameters(transformer).values()} == {torch.bfloat16}
    assert transformer.transformer_blocks[0].attn.to_q.base_layer.weight.dtype == torch.float32


def contents(file):
    """Tensors and settings of an adapter's file, without the prefix that pipelines give them.

    The order of the layers' names is nobody's business.
    """
    with safe_open(file, "pt") as handle:
        settings = json.loads(handle.metadata()["lora_adapter_metadata"])
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - it is no dict
    settings, tensors = (
        {n.removeprefix(PREFIX): v for n, v in part.items()} for part in (settings, tensors)
    )
    return settings | {"target_modules": sorted(settings["target_modules"])}, tensors


def test_a_saved_adapter_is_loaded_or_refused(backbone, tiny_folder, tmp_path):
    add(backbone)
    for parameter in adapter_parameters(backbone.transformer).values():
        parameter.data += 0.1
    write_file(tmp_path / LORA_FILE, adapter_file(backbone.transformer))
    backbone.transformer.save_lora_adapter(
        tmp_path / "stock", adapter_name=POLICY, weight_name=LORA_FILE
    )
    (settings, tensors), (theirs, stock) = (
        contents(folder / LORA_FILE) for folder in (tmp_path, tmp_path / "stock")
    )
    assert settings == theirs and tensors.keys() == stock.keys()
    assert all(torch.equal(value, stock[name]) for name, value in tensors.items())
    other = Hunyuan15(tiny_folder)
    add(other)
    load_adapter(other.transformer, tmp_path)
    assert torch.equal(velocity(other), velocity(backbone))
    wider = Hunyuan15(tiny_folder)
    add_adapter(wider.transformer, 8, 8, NAMES, torch.float32)
    with pytest.raises(ValueError, match="does not fit lora_r"):
        load_adapter(wider.transformer, tmp_path)


def test_stock_diffusers_loads_it_into_the_transformer_of_a_pipeline(
    backbone, tiny_folder, tmp_path
):
    add(backbone)
    for parameter in adapter_parameters(backbone.transformer).values():
        parameter.data += 0.1
    save(backbone, tmp_path)
    stock = Hunyuan15(tiny_folder)
    plain = velocity(stock)
    stock.transformer.load_lora_adapter(
        tmp_path, weight_name=LORA_FILE
    )  # and the prefix that it expects
    assert torch.equal(velocity(stock), velocity(backbone)) and not torch.equal(
        velocity(stock), plain
    )


def save(backbone, folder):
    write_file(folder / LORA_FILE, adapter_file(backbone.transformer))


def rewrite(folder, tensors=None, **settings):
    """Change a saved adapter: tensors by name, settings by name (None takes one away)."""
    old, kept = contents(folder / LORA_FILE)
    told = {name: value for name, value in (old | settings).items() if value is not None}
    save_file(
        kept | (tensors or {}), folder / LORA_FILE, {"lora_adapter_metadata": json.dumps(told)}
    )


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


SLOW = "(a+)+" * 20 + "b"  # a regular expression that takes for ever
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
    assert (
        str(caught.value).startswith(f"{tmp_path / LORA_FILE} ")
        and len(str(caught.value).splitlines()) == 1
    )


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
@pytest.mark.parametrize("told", [True, False], ids=["settings", "no settings"])
def test_an_adapter_with_other_tensors_is_refused_in_one_sentence(
    backbone, tmp_path, tensors, told
):
    add(backbone)
    save(backbone, tmp_path)
    rewrite(tmp_path, tensors)
    if not told:
        save_file(load_file(tmp_path / LORA_FILE), tmp_path / LORA_FILE)
    for load in (lambda folder: load_adapter(backbone.transformer, folder), backbone.load_weights):
        with pytest.raises(ValueError) as caught:
            load(tmp_path)
        assert (
            str(caught.value).startswith(f"{tmp_path / LORA_FILE} ")
            and len(str(caught.value).splitlines()) == 1
        )


def test_a_merged_adapter_is_the_adapter(backbone, tiny_folder, tmp_path):
    add(backbone)
    for parameter in adapter_parameters(backbone.transformer).values():
        parameter.data += 0.1
    write_file(tmp_path / LORA_FILE, adapter_file(backbone.transformer))
    base, plain = ModelFolder(tiny_folder).weights("transformer"), Hunyuan15(tiny_folder)
    tensors = dict(merged(base, tmp_path / LORA_FILE))
    changed = {name for name, value in tensors.items() if not torch.equal(value, base.read(name))}
    assert changed == {f"{layer}.weight" for layer in target_layers(plain.transformer, NAMES)}
    plain.transformer.load_state_dict(tensors)
    torch.testing.assert_close(velocity(plain), velocity(backbone), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="does not fit"):
        dict(merged(ModelFolder(tiny_folder).weights("vae"), tmp_path / LORA_FILE))
