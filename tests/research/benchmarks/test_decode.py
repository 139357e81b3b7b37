"""Ways to decode: each gives the clip of the stock VAE."""

from functools import partial

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15

from research.benchmarks import decode as script
from tests.smallest_run import slow


@pytest.fixture
def vae(tiny_folder):
    return AutoencoderKLHunyuanVideo15.from_pretrained(
        tiny_folder, subfolder="vae", dtype=torch.float64
    )


def latents(vae):
    shape = (1, vae.config.latent_channels, 2, 4, 4)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [slow(name) if "compiled" in name else name for name in script.WAYS]
)
def test_every_way_gives_the_stock_clip(vae, name, monkeypatch):
    """Slow: compiled."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    expected = vae.decode(latents(vae)).sample
    for change in script.WAYS[name]:
        change(vae)
    torch.testing.assert_close(vae.decode(latents(vae)).sample, expected, rtol=0, atol=1e-12)
