"""The forward matches the stock forward in values, gradients and files, however the blocks run."""

import copy
import functools
import json

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from sage_grpo.models.lora import add_adapter, init_adapter
from sage_grpo.models.wan.backbone import Wan
from sage_grpo.models.wan.transformer import WanTransformer
from sage_grpo.train.optimization import trainable_parameters
from tests.models.kernels import CountedKernels
from tests.smallest_run import slow

LENGTH = 9  # text tokens


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(batch, per_clip=False, grid=(2, 4, 6), clean=False):
    """clean: whether the first frame has timestep 0."""
    timestep = torch.tensor([978.26, 500.0, 31.5][:batch] if per_clip else [731.7])
    if clean:
        timestep = torch.stack([torch.zeros_like(timestep), timestep], dim=1)
    return draw(batch, 4, *grid), timestep, draw(1, LENGTH, 24, seed=2)


def load(kind, folder):
    return kind.from_pretrained(folder, subfolder="transformer").double().eval()


@pytest.fixture(scope="module")
def models(wan_folder):
    """Our transformer and the stock one."""
    model = load(WanTransformer, wan_folder)
    model(*inputs(1))  # makes the rotary tables, before `exact`
    return model, load(WanTransformer3DModel, wan_folder)


def stock_forward(model, x, timestep, text):
    batch = len(x)
    if timestep.ndim == 2:  # stock has one for each token
        frames, rows, columns = x.shape[2:]
        by_frame = torch.cat([timestep[:, :1], timestep[:, 1:].expand(-1, frames - 1)], dim=1)
        timestep = by_frame.repeat_interleave(rows * columns // 4, dim=1)
    timestep = timestep.double().expand(batch, *timestep.shape[1:])
    return model(x, timestep, text.expand(batch, -1, -1), return_dict=False)[0]


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("batch, per_clip", [(1, False), (3, False), (3, True)])
def test_values_and_gradients_are_the_stock_ones(models, exact, batch, per_clip, clean):
    model, stock = models
    args = inputs(batch, per_clip, clean=clean)
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


def test_no_tensor_has_a_modulation_for_each_token(wan_folder):
    """Stock makes six numbers per channel and token of them."""
    model = load(WanTransformer, wan_folder)
    x, timestep, text = inputs(1, grid=(5, 16, 16), clean=True)
    tokens = 5 * 8 * 8
    largest = tokens * model.config.ffn_dim  # inside the feed-forward

    class Sizes(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.most = max(self.most, result.numel())
            return result

    with torch.no_grad(), Sizes() as sizes:
        model(x, timestep, text)
    assert sizes.most == largest < tokens * 6 * model.scale_shift_table.shape[-1]


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


@pytest.mark.parametrize("use_lora, clean", [(True, False), slow(False, False), slow(True, True)])
def test_compiled_blocks_run_one_arithmetic_and_one_graph(wan_folder, monkeypatch, use_lora, clean):
    """Slow: without an adapter, and with a clean first frame."""
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
    args = inputs(2, clean=clean)
    with torch.no_grad():
        rollout = model(*args)
        expected = plain(*args)
    velocity = model(*args)
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
