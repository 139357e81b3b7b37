"""The packed forward matches the stock forward in values, gradients and files."""

import copy
import functools
import json

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch._dynamo.utils import counters

from sage_grpo.models.hunyuan15.transformer import PackedTransformer
from sage_grpo.models.lora import add_adapter, init_adapter
from sage_grpo.parallel.fsdp import shard
from sage_grpo.train.optimization import trainable_parameters
from tests.dist import run_ranks
from tests.models.kernels import CountedKernels
from tests.narrow_glyphs import GLYPH_DIM
from tests.smallest_run import slow

TEXT_LEN = 7
TEXT_PAD = 4
GLYPH_PAD = 9


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def padded(tokens, length, batch):
    """Tokens (1, S, D) -> (batch, length, D) with rubbish as padding, and the mask of the valid ones."""
    rubbish = 10 * draw(1, length - tokens.shape[1], tokens.shape[2], seed=9)
    mask = torch.arange(length).expand(batch, -1) < tokens.shape[1]
    return torch.cat([tokens, rubbish], dim=1).expand(batch, -1, -1), mask.double()


def stock_forward(model, x, timestep, text, glyph):
    batch = len(x)
    text, text_mask = padded(text, TEXT_LEN + TEXT_PAD, batch)
    glyph, glyph_mask = padded(glyph, GLYPH_PAD, batch)
    return model(
        hidden_states=x,
        timestep=timestep.double().expand(batch),
        encoder_hidden_states=text,
        encoder_attention_mask=text_mask,
        encoder_hidden_states_2=glyph,
        encoder_attention_mask_2=glyph_mask,
        image_embeds=torch.zeros(batch, 3, 16, dtype=x.dtype),  # text to video
        return_dict=False,
    )[0]


def inputs(batch, glyph_len, per_clip=False, grid=(2, 4, 4)):
    timestep = torch.tensor([978.26, 500.0, 31.5][:batch] if per_clip else [731.7])
    return (
        draw(batch, 17, *grid),
        timestep,
        draw(1, TEXT_LEN, 64, seed=2),
        draw(1, glyph_len, GLYPH_DIM, seed=3),
    )


@pytest.fixture(scope="module")
def models(tiny_folder):
    load = {"subfolder": "transformer", "dtype": torch.float64}
    stock = HunyuanVideo15Transformer3DModel.from_pretrained(tiny_folder, **load)
    return PackedTransformer.from_pretrained(tiny_folder, **load), stock


@pytest.mark.parametrize("batch, per_clip", [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("glyph_len", [0, 5])
def test_packed_forward_equals_padded_masked_stock_forward(models, batch, per_clip, glyph_len):
    packed, stock = models
    args = inputs(batch, glyph_len, per_clip)
    with torch.no_grad():
        torch.testing.assert_close(packed(*args), stock_forward(stock, *args), rtol=0, atol=1e-12)


# The stock RMS norm works in fp32; a group shares its text, so its packed gradient is summed before that rounding.
@pytest.mark.parametrize("batch, tolerance", [(1, 1e-12), (3, 1e-6)])
@pytest.mark.parametrize("glyph_len", [0, 5])
def test_packed_gradients_equal_stock_gradients(models, batch, tolerance, glyph_len):
    packed, stock = models
    args = inputs(batch, glyph_len)
    weight = draw(batch, 8, 2, 4, 4, seed=5)
    grads = []
    for model, out in ((packed, packed(*args)), (stock, stock_forward(stock, *args))):
        loss = (out * weight).sum()
        names, params = zip(*model.named_parameters(), strict=True)
        values = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
        grads.append(dict(zip(names, values, strict=True)))
    packed_grads, stock_grads = grads
    assert packed_grads.keys() == stock_grads.keys()
    for name, expected in stock_grads.items():
        error = (packed_grads[name] - expected).abs().max()
        assert error <= tolerance * expected.abs().max() + 1e-15, name


def test_spatial_patches_are_put_back_in_order():
    torch.manual_seed(0)
    stock = HunyuanVideo15Transformer3DModel(
        in_channels=17, out_channels=8, num_attention_heads=2, attention_head_dim=12, num_layers=1, patch_size=2,
        patch_size_t=2, text_embed_dim=64, text_embed_2_dim=GLYPH_DIM, image_embed_dim=16, rope_axes_dim=(4, 4, 4),
    ).double()  # fmt: skip
    packed = PackedTransformer.from_config(stock.config).double()
    packed.load_state_dict(stock.state_dict())
    args = inputs(2, 5, grid=(2, 4, 6))
    with torch.no_grad():
        torch.testing.assert_close(packed(*args), stock_forward(stock, *args), rtol=0, atol=1e-12)


def test_checkpointing_recomputes_each_block_and_changes_no_gradient(tiny_folder):
    packed = PackedTransformer.from_pretrained(
        tiny_folder, subfolder="transformer", dtype=torch.float64
    )
    calls = []
    for block in packed.transformer_blocks:
        block.ff.register_forward_pre_hook(lambda *_: calls.append(1))
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            packed.prepare_blocks(recomputed=1.0)
        packed.zero_grad()
        packed(*inputs(2, 5)).square().mean().backward()
        grads.append(packed.transformer_blocks[0].attn.to_q.weight.grad.clone())
    # once plain, then forward and recomputation
    assert len(calls) == 3 * len(packed.transformer_blocks)
    assert grads[0].abs().max() > 0
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_kept_attention_is_not_computed_again(tiny_folder):
    grads = []
    counts = []
    for keep in (False, True):
        packed = PackedTransformer.from_pretrained(
            tiny_folder, subfolder="transformer", dtype=torch.float64
        )
        packed.prepare_blocks(recomputed=1.0, keep_attention=keep)
        with CountedKernels() as kernels:
            packed(*inputs(2, 5)).square().mean().backward()
        grads.append(packed.transformer_blocks[0].attn.to_q.weight.grad)
        counts.append(kernels.count)
    blocks = len(packed.transformer_blocks)
    assert counts[0] - counts[1] == blocks  # all but the recomputation
    assert torch.equal(*grads)


def test_bf16_model_tells_timesteps_apart_that_bf16_cannot(tiny_folder):
    packed = PackedTransformer.from_pretrained(tiny_folder, subfolder="transformer")
    packed.time_embed.bfloat16()
    near = torch.tensor([978.26])
    far = torch.tensor([980.0])
    assert near.bfloat16() == far.bfloat16()
    embedded = packed._time_embedding(near, torch.bfloat16)
    assert embedded.dtype == torch.bfloat16
    assert (embedded - packed._time_embedding(far, torch.bfloat16)).abs().max() > 0.01


def test_saved_folder_is_a_stock_folder(models, tmp_path):
    packed, stock = models
    packed.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["_class_name"] == "HunyuanVideo15Transformer3DModel"
    again = HunyuanVideo15Transformer3DModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert again.config.rope_axes_dim == stock.config.rope_axes_dim
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("use_lora", [True, slow(False)])
def test_compiled_blocks_run_one_arithmetic_and_few_graphs(tiny_folder, monkeypatch, use_lora):
    """Rollout and training agree to the last bit, and neither blocks nor lengths of text are compiled one by one."""
    # other backends need a C++ compiler
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    packed = PackedTransformer.from_pretrained(
        tiny_folder, subfolder="transformer", dtype=torch.float64
    )
    plain = copy.deepcopy(packed)
    if use_lora:
        for model in (packed, plain):
            add_adapter(model, 4, 8, ("to_q", "to_out.0"), torch.float64)
            init_adapter(model, 0)
    trained = trainable_parameters(packed, use_lora)
    torch._dynamo.reset()
    counters.clear()
    packed.prepare_blocks(recomputed=1.0, keep_attention=True, compiled=True)
    for length in (7, 5, 6):
        x, timestep, text, glyph = inputs(2, 0)
        with torch.no_grad():
            rollout = packed(x, timestep, text[:, :length], glyph)
            expected = plain(x, timestep, text[:, :length], glyph)
        velocity = packed(x, timestep, text[:, :length], glyph)
        assert torch.equal(rollout, velocity)
        assert velocity.requires_grad and not rollout.requires_grad
        torch.testing.assert_close(velocity, expected, rtol=1e-12, atol=1e-12)
    velocity.square().sum().backward()
    assert all(parameter.grad is not None for parameter in trained.values())
    # two graphs, because the last block trains less
    assert counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]


def graphs_of_a_sharded_model(ranks, folder):
    """Graphs after prompts of three lengths; FSDP's hooks run between `run_block` and the compiled forward."""
    # this process has no other work
    torch.compile = functools.partial(torch.compile, backend="eager")
    packed = PackedTransformer.from_pretrained(folder, subfolder="transformer", dtype=torch.float64)
    add_adapter(packed, 4, 8, ("to_q", "to_out.0"), torch.float64)
    init_adapter(packed, 0)
    trainable_parameters(packed, True)
    packed.prepare_blocks(recomputed=1.0, keep_attention=True, compiled=True)
    shard(packed, packed.all_blocks, ranks.shard_mesh, torch.float64)
    for length in (7, 5, 6):
        x, timestep, text, glyph = inputs(2, 0)
        with torch.no_grad():
            rollout = packed(x, timestep, text[:, :length], glyph)
        assert torch.equal(rollout, packed(x, timestep, text[:, :length], glyph))
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_lengths_of_text_share_a_graph_under_fsdp_too(tiny_folder):
    """With a second graph for the first length, what runs would depend on what ran before: a ratio that is not 1.

    Slow: two ranks, compiled; without ranks it is test_compiled_blocks_run_one_arithmetic_and_few_graphs.
    """
    (graphs,) = run_ranks(1, graphs_of_a_sharded_model, tiny_folder, sharded=True)
    assert graphs <= 2
