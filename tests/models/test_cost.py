"""Token and FLOP counts against independently counted figures."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sage_grpo.models.registry import open_backbone
from tests.narrow_glyphs import GLYPH_DIM


@pytest.fixture(scope="module")
def full_size(tmp_path_factory):
    absent = tmp_path_factory.mktemp("models") / "absent"
    return open_backbone(absent, complete=False).architecture()


@pytest.mark.parametrize(
    "clip, tokens", [((81, 480, 848), 33390), ((121, 480, 848), 49290), ((121, 720, 1280), 111600)]
)
def test_tokens_of_published_sizes(full_size, clip, tokens):
    assert full_size.video_tokens(*clip) == tokens


def test_tokens_are_the_places_of_the_latents(tiny_folder):
    """Also where a model compresses less than the published one."""
    backbone = open_backbone(tiny_folder)
    architecture = backbone.architecture()
    channels, *grid = backbone.latent_shape(9, 32, 48)
    assert architecture.channels == channels
    assert architecture.video_tokens(9, 32, 48) == torch.tensor(grid).prod() == 3 * 8 * 12


def test_operations_are_those_that_torch_counts(tiny_folder):
    """Operations of the blocks; the embeddings around them are left out."""
    backbone = open_backbone(tiny_folder)
    x = torch.randn(1, 17, 4, 8, 8)
    text = torch.randn(1, 40, 64)
    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(depth=None, display=False) as counter,
        torch.no_grad(),
    ):
        backbone.transformer(x, torch.tensor([500.0]), text, torch.zeros(1, 0, GLYPH_DIM))
    counted = sum(
        sum(counts.values())
        for name, counts in counter.get_flop_counts().items()
        if "transformer_blocks" in name and name.count(".") == 2  # whole blocks
    )
    work = backbone.architecture().forward(4 * 8 * 8, 40)
    assert counted == pytest.approx(sum(work), rel=0.01)


def test_the_full_model_needs_680_tera_operations(full_size):
    assert sum(full_size.forward(33390, 150)) == pytest.approx(680e12, rel=0.01)
