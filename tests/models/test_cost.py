"""Tokens and operations against figures that were counted elsewhere."""

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sage_grpo.models.cost import forward, video_tokens
from sage_grpo.models.packed import PackedTransformer


@pytest.mark.parametrize(
    "clip, tokens", [((81, 480, 848), 33390), ((121, 480, 848), 49290), ((121, 720, 1280), 111600)]
)
def test_tokens_of_published_sizes(clip, tokens):
    assert video_tokens(*clip) == tokens


def test_operations_are_those_that_torch_counts(tiny_folder):
    """Of the blocks; the embeddings around them are left out."""
    model = PackedTransformer.from_pretrained(tiny_folder, subfolder="transformer")
    x, text = torch.randn(1, 17, 4, 8, 8), torch.randn(1, 40, 64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(depth=None, display=False) as counter, torch.no_grad():
        model(x, torch.tensor([500.0]), text, torch.zeros(1, 0, 16))
    blocks = {n: c for n, c in counter.get_flop_counts().items() if "transformer_blocks" in n and n.count(".") == 2}
    counted = sum(sum(counts.values()) for counts in blocks.values())
    work = forward(model.config, 4 * 8 * 8, 40)
    assert counted == pytest.approx(work.total, rel=0.01)
    assert work.backward(True) - work.backward(False) == work.linear


def test_the_full_model_needs_680_tera_operations():
    with torch.device("meta"):
        config = HunyuanVideo15Transformer3DModel().config
    assert forward(config, 33390, 150).total == pytest.approx(680e12, rel=0.01)
