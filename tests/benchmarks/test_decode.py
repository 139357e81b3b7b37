"""Ways to decode: each gives the clip of the stock VAE, and the decoder is one graph for the compiler."""

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15

from benchmarks import decode as script


@pytest.fixture
def vae(tiny_folder):
    return AutoencoderKLHunyuanVideo15.from_pretrained(tiny_folder, subfolder="vae", dtype=torch.float64)


def latents(vae):
    shape = (1, vae.config.latent_channels, 2, 4, 4)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in script.WAYS if "compiled" not in name])
def test_every_way_gives_the_stock_clip(vae, name):
    expected = vae.decode(latents(vae)).sample
    for change in script.WAYS[name]:
        change(vae)
    torch.testing.assert_close(vae.decode(latents(vae)).sample, expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_the_decoder_is_one_graph(vae, monkeypatch):
    given = []
    monkeypatch.setattr(torch, "compile", lambda forward, **_: given.append(forward) or forward)
    assert torch._dynamo.explain(vae.decoder.forward)(latents(vae)).graph_count > 1
    torch._dynamo.reset()
    script.compiled(vae)
    assert torch._dynamo.explain(given[0])(latents(vae)).graph_count == 1
