"""The forward matches the stock forward in values, gradients and files, however the blocks run."""

import copy
import functools
import json

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch._dynamo.utils import counters

from sage_grpo.models.lora import add_adapter, init_adapter
from sage_grpo.models.wan.backbone import Wan
from sage_grpo.models.wan.transformer import WanTransformer
from sage_grpo.train.optimization import trainable_parameters
from tests.models.kernels import CountedKernels

LENGTH = 9  # text tokens


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(batch, per_clip=False, grid=(2, 4, 6)):
    timestep = torch.tensor([978.26, 500.0, 31.5][:batch] if per_clip else [731.7])
    return draw(batch, 4, *grid), timestep, draw(1, LENGTH, 24, seed=2)


def load(kind, folder):
    return kind.from_pretrained(folder, subfolder="transformer").double().eval()


@pytest.fixture(scope="module")
def models(wan_folder):
    """Our transformer and the stock one."""
    model = load(WanTransformer, wan_folder)
    model(*inputs(1))  # makes the rotary tables, before `exact`
    return model, load(WanTransformer3DModel, wan_folder)


@pytest.fixture
def exact(monkeypatch):
    """Norms and modulation in fp64 too: the stock blocks compute them in fp32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def stock_forward(model, x, timestep, text):
    batch = len(x)
    timestep = timestep.double().expand(batch)
    return model(x, timestep, text.expand(batch, -1, -1), return_dict=False)[0]


@pytest.mark.parametrize("batch, per_clip", [(1, False), (3, False), (3, True)])
def test_values_and_gradients_are_the_stock_ones(models, exact, batch, per_clip):
    model, stock = models
    args = inputs(batch, per_clip)
    weight = draw(batch, 4, 2, 4, 6, seed=5)
    velocity = model(*args)
    expected = stock_forward(stock, *args)
    torch.testing.assert_close(velocity, expected, rtol=0, atol=1e-10)

    def gradients(network, output):
        names, parameters = zip(*network.named_parameters(), strict=True)
        values = torch.autograd.grad((output * weight).sum(), parameters)
        return dict(zip(names, values, strict=True))

    grads = gradients(model, velocity)
    expected_grads = gradients(stock, expected)
    assert grads.keys() == expected_grads.keys()
    for name, value in expected_grads.items():
        assert value.abs().max() > 1e-6, name
        assert (grads[name] - value).abs().max() <= 1e-10 * value.abs().max(), name


def test_other_patches_are_put_back_in_order(exact):
    torch.manual_seed(0)
    stock = WanTransformer3DModel(
        patch_size=(1, 2, 4),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=24,
        freq_dim=32,
        ffn_dim=16,
        num_layers=1,
    ).double()
    model = WanTransformer.from_config(stock.config).double()
    model.load_state_dict(stock.state_dict())
    args = inputs(2, grid=(4, 4, 8))
    with torch.no_grad():
        # up to 1e-6, because each has rotary tables of its own
        torch.testing.assert_close(model(*args), stock_forward(stock, *args), rtol=0, atol=1e-6)


def test_kept_attention_is_self_attention(wan_folder):
    """Cross-attention is recomputed even so: its output takes as much memory and is cheap to compute."""
    grads = []
    counts = []
    for keep in (False, True):
        model = load(WanTransformer, wan_folder)
        model.prepare_blocks(recomputed=1.0, keep_attention=keep)
        with CountedKernels() as kernels:
            model(*inputs(2)).square().mean().backward()
        grads.append(model.blocks[0].attn1.to_q.weight.grad)
        counts.append(kernels.count)
    blocks = len(model.blocks)
    assert counts == [4 * blocks, 3 * blocks]  # both attentions, forward and again
    assert torch.equal(*grads)


@pytest.mark.parametrize("use_lora", [True, False])
def test_compiled_blocks_run_one_arithmetic_and_one_graph(wan_folder, monkeypatch, use_lora):
    # other backends need a C++ compiler
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model = load(WanTransformer, wan_folder)
    plain = copy.deepcopy(model)
    if use_lora:
        for transformer in (model, plain):
            add_adapter(transformer, 4, 8, Wan.lora_targets, torch.float64)
            init_adapter(transformer, 0)
    trained = trainable_parameters(model, use_lora)
    torch._dynamo.reset()
    counters.clear()
    model.prepare_blocks(recomputed=1.0, keep_attention=True, compiled=True)
    with torch.no_grad():
        rollout = model(*inputs(2))
        expected = plain(*inputs(2))
    velocity = model(*inputs(2))
    assert torch.equal(rollout, velocity)
    assert velocity.requires_grad and not rollout.requires_grad
    torch.testing.assert_close(velocity, expected, rtol=1e-12, atol=1e-12)
    velocity.square().sum().backward()
    assert all(parameter.grad is not None for parameter in trained.values())
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_bf16_model_tells_timesteps_apart_that_bf16_cannot(wan_folder):
    model = WanTransformer.from_pretrained(wan_folder, subfolder="transformer").bfloat16()
    near = torch.tensor([978.26])
    far = torch.tensor([980.0])
    assert near.bfloat16() == far.bfloat16()
    text = torch.zeros(1, 1, 24, dtype=torch.bfloat16)
    embedded, other = (model.condition_embedder(timestep, text)[0] for timestep in (near, far))
    assert embedded.dtype == torch.bfloat16 and (embedded - other).abs().max() > 0.01


def test_saved_folder_is_a_stock_folder(models, tmp_path):
    model, stock = models
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["_class_name"] == "WanTransformer3DModel"
    again = WanTransformer3DModel.from_pretrained(tmp_path, dtype=torch.float64).double()
    assert again.config.rope_max_seq_len == stock.config.rope_max_seq_len
    for name, value in stock.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.float().double()), name
