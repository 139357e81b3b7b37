"""ComfyUI's layout: names of its modules, stacked query, key and value, and the same model after merging.

Oracles: diffusers' own converters for Wan, Tencent's names for HunyuanVideo-1.5, and ComfyUI itself. For the last one,
COMFYUI_PATH names a checkout of it, and where its requirements are, like PYTHONPATH.
"""

import json
import logging
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel, WanTransformer3DModel
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_wan_lora_to_diffusers
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from torch import nn

from sage_grpo.models import comfyui
from sage_grpo.models.weights import Weights
from scripts.export_checkpoint import to_tencent

# Names of ComfyUI's modules, as its own classes list them, with # for the number of a block.
COMFYUI_NAMES = json.loads((Path(__file__).parents[1] / "fixtures/comfyui_names.json").read_text())

# Sizes that ComfyUI accepts: it has heads of 128, and infers everything else.
CLASSES = {
    "hunyuan15": (
        HunyuanVideo15Transformer3DModel,
        {
            "num_attention_heads": 1, "attention_head_dim": 128, "num_layers": 2, "num_refiner_layers": 2,
            "text_embed_dim": 32, "text_embed_2_dim": 1472, "image_embed_dim": 1152,
        },
    ),
    "wan21": (
        WanTransformer3DModel,
        {"num_attention_heads": 1, "ffn_dim": 80, "num_layers": 2},
    ),
}  # fmt: skip
SCALE = 1.5
RANK = 3


@pytest.fixture(scope="module", params=CLASSES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def transformer(name):
    """With random weights, norms too: a swap would show. Read-only."""
    kind, sizes = CLASSES[name]
    model = kind(**sizes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def adapter(transformer):
    """An adapter of every linear layer. Read-only."""
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for layer, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            rows, columns = module.weight.shape
            tensors[f"{layer}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator)
            tensors[f"{layer}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator)
    return tensors


def stored(tensors):
    return Weights(Path("model"), {name: [tensor] for name, tensor in tensors.items()})


def read(weights):
    return {name: weights.read(name) for name in weights.names}


def merged(weights, adapter, scale):
    """All weights with B A added, by name."""
    result = {name: tensor.double() for name, tensor in weights.items()}
    for name in adapter:
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            product = adapter[f"{layer}.lora_B.weight"].double() @ adapter[name].double()
            result[f"{layer}.weight"] = result[f"{layer}.weight"] + scale * product
    return result


def without_prefix(tensors):
    return {name.removeprefix(comfyui.PREFIX): tensor for name, tensor in tensors.items()}


def assert_same(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6, msg=name)


def test_every_tensor_gets_a_name_that_comfyui_has(name, transformer, adapter):
    names = comfyui.all_weights(stored(transformer.state_dict())).names
    assert {re.sub(r"\b\d+\b(?=\.)", "#", each, count=1) for each in names} == {
        re.sub(r"\b\d+\b(?=\.)", "#", each, count=1) for each in COMFYUI_NAMES[name]
    }
    modules = {each.removesuffix(".weight") for each in names}
    for key in comfyui.lora(adapter, SCALE):
        prefix, module = re.fullmatch(r"(diffusion_model\.)(.*)\.lora_[AB]\.weight", key).groups()
        assert prefix == "diffusion_model." and module in modules


def test_merging_in_comfyuis_layout_is_merging_in_ours(transformer, adapter):
    weights = transformer.state_dict()
    expected = read(comfyui.all_weights(stored(merged(weights, adapter, SCALE))))
    base = read(comfyui.all_weights(stored(weights)))
    assert_same(merged(base, without_prefix(comfyui.lora(adapter, SCALE)), 1), expected)


def in_comfyui(tencent):
    """Tencent's tensors under the names that ComfyUI gives them when it loads a file, with q, k and v stacked."""
    stacked = {}
    for name, tensor in tencent.items():
        match = re.fullmatch(r"(.*_attn)_[qkv](\.\w+)", name)
        if match:
            stacked.setdefault(f"{match[1]}.qkv{match[2]}", []).append((name, tensor))
            continue
        name = re.sub(r"(_attn)_(qkv|proj)\b", r"\1.\2", name)
        name = re.sub(r"_attn_q_norm\.weight", "_attn.norm.query_norm.scale", name)
        name = re.sub(r"_attn_k_norm\.weight", "_attn.norm.key_norm.scale", name)
        name = re.sub(r"_mod\.linear\b", "_mod.lin", name)
        name = re.sub(r"mlp\.fc([12])\b", lambda match: f"mlp.{2 * int(match[1]) - 2}", name)
        for embedder in ("time_in", "time_r_in", "txt_in.t_embedder"):
            name = name.replace(f"{embedder}.mlp.0", f"{embedder}.in_layer")
            name = name.replace(f"{embedder}.mlp.2", f"{embedder}.out_layer")
        name = name.replace("c_embedder.linear_1", "c_embedder.in_layer")
        name = name.replace("c_embedder.linear_2", "c_embedder.out_layer")
        stacked[name] = [(name, tensor)]
    order = {"q": 0, "k": 1, "v": 2}
    return {
        name: torch.cat(
            [t for _, t in sorted(parts, key=lambda part: order.get(part[0].split(".")[-2][-1], 0))]
        )
        for name, parts in stacked.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hunyuan15"], indirect=True)
def test_hunyuan_merged_by_tencents_names(transformer, adapter):
    """Adds Tencent's names: our merge, written with them, is the exported LoRA added to Tencent's weights."""
    weights = transformer.state_dict()
    tencent = read(stored(weights).renamed(to_tencent("transformer", weights)))
    ours = merged(weights, adapter, SCALE)
    tencent_merged = read(stored(ours).renamed(to_tencent("transformer", weights)))
    exported = without_prefix(comfyui.lora(adapter, SCALE))
    assert_same(merged(in_comfyui(tencent), exported, 1), in_comfyui(tencent_merged))


@pytest.mark.parametrize("name", ["wan21"], indirect=True)
def test_wan_comes_back_through_diffusers(transformer, adapter):
    weights = transformer.state_dict()
    exported = read(comfyui.all_weights(stored(weights)))
    returned = convert_wan_transformer_to_diffusers(dict(exported))
    assert returned.keys() == weights.keys()
    assert all(torch.equal(returned[key], weights[key]) for key in weights)

    lora = _convert_non_diffusers_wan_lora_to_diffusers(comfyui.lora(adapter, SCALE))
    expected = {
        f"transformer.{key}": SCALE * tensor if ".lora_B." in key else tensor
        for key, tensor in adapter.items()
    }
    assert lora.keys() == expected.keys()
    assert all(torch.equal(lora[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["hunyuan15"], indirect=True)
def test_an_adapter_of_some_stacked_layers_leaves_the_others_alone(transformer, adapter):
    some = {
        key: tensor for key, tensor in adapter.items() if ".to_q." in key or ".add_v_proj." in key
    }
    weights = transformer.state_dict()
    expected = read(comfyui.all_weights(stored(merged(weights, some, SCALE))))
    base = read(comfyui.all_weights(stored(weights)))
    assert_same(merged(base, without_prefix(comfyui.lora(some, SCALE)), 1), expected)


@pytest.mark.parametrize("a, b", [((2, 8), (4, 2)), ((2, 4), (5, 2))])
def test_layers_that_cannot_be_stacked_are_an_error(a, b):
    layer = "transformer_blocks.0.attn"
    pairs = {
        f"{layer}.to_q.lora_A.weight": torch.ones(2, 4),
        f"{layer}.to_q.lora_B.weight": torch.ones(4, 2),
        f"{layer}.to_k.lora_A.weight": torch.ones(a),
        f"{layer}.to_k.lora_B.weight": torch.ones(b),
    }
    with pytest.raises(ValueError, match=r"layers of several sizes for double_blocks\.0\.img_attn"):
        comfyui.lora(pairs, SCALE)


def test_what_has_no_place_is_an_error(transformer, adapter):
    layer = "blocks.0.new" if "blocks.0.attn1.to_q.lora_A.weight" in adapter else "new_blocks.0.q"
    more = {f"{layer}.lora_A.weight": torch.ones(2, 4), f"{layer}.lora_B.weight": torch.ones(4, 2)}
    with pytest.raises(ValueError, match=rf"^the adapter of {layer} has no place in ComfyUI's"):
        comfyui.lora(adapter | more, SCALE)
    weights = transformer.state_dict()
    assert comfyui.has_layout(weights)
    assert not comfyui.has_layout([*weights, f"{layer}.weight"])
    with pytest.raises(ValueError, match=rf"^the tensor {layer}\.weight has no place in ComfyUI's"):
        comfyui.all_weights(stored(weights | {f"{layer}.weight": torch.ones(2)}))


def test_numbers_that_a_data_type_cannot_hold_are_an_error():
    tensors = {"a": torch.tensor([1e5])}
    assert comfyui.cast(tensors, torch.bfloat16)["a"].dtype == torch.bfloat16
    assert comfyui.cast(tensors, None)["a"] is tensors["a"]
    with pytest.raises(ValueError, match=r"^a has numbers that torch\.float16 cannot hold"):
        comfyui.cast(tensors, torch.float16)


@pytest.fixture(scope="module")
def comfy():
    """ComfyUI's own modules, on the CPU."""
    if "COMFYUI_PATH" not in os.environ:
        pytest.skip("ComfyUI is not here (COMFYUI_PATH)")
    sys.path += os.environ["COMFYUI_PATH"].split(os.pathsep)
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import comfy.lora
    import comfy.model_detection

    return comfy


def test_comfyui_itself_loads_all_weights_and_the_adapter(comfy, transformer, adapter, caplog):
    """Beyond the table of names: its detection of the model, its loader and its merge."""
    weights = read(comfyui.all_weights(stored(transformer.state_dict())))
    config = comfy.model_detection.model_config_from_unet(dict(weights), "")
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model(weights, "")
    with caplog.at_level(logging.WARNING):
        model.load_model_weights(dict(weights), "")
        key_map = comfy.lora.model_lora_keys_unet(model, {})
        patches = comfy.lora.load_lora(comfyui.lora(adapter, SCALE), key_map)
    assert not caplog.records  # neither missing nor unexpected keys, none of the adapter's left out

    loaded = {
        key: tensor for key, tensor in model.state_dict().items() if key.startswith(comfyui.PREFIX)
    }
    assert without_prefix(loaded).keys() == weights.keys()
    expected = read(comfyui.all_weights(stored(merged(transformer.state_dict(), adapter, SCALE))))
    for key, tensor in loaded.items():
        if key in patches:
            patch = (1.0, patches[key], 1.0, None, None)
            tensor = comfy.lora.calculate_weight([patch], tensor.clone(), key)
        torch.testing.assert_close(
            tensor.double(),
            expected[key.removeprefix(comfyui.PREFIX)].double(),
            rtol=1e-4,
            atol=1e-3,
        )
