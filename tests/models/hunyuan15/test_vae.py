"""The adapted VAE: the stock result for one clip and for each of a batch, with 2-D convolutions and fused kernels."""

from functools import partial

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

from sage_grpo.models.cost import UNTILED
from sage_grpo.models.hunyuan15.vae import (
    allow_batches,
    causal_frame_mask,
    fast_on_cpu,
    fuse_decoder,
)
from sage_grpo.models.registry import open_backbone
from tests.smallest_run import slow


def test_mask_is_the_stock_mask_with_a_head_axis():
    args = (3, 4, torch.float32, torch.device("cpu"))
    stock = HunyuanVideo15AttnBlock.prepare_causal_attention_mask(*args)
    assert torch.equal(causal_frame_mask(*args)[0, 0], stock)


ADAPTED = {
    "3d": allow_batches,
    "2d": lambda vae: fast_on_cpu(allow_batches(vae)),
    "fused": lambda vae: fuse_decoder(allow_batches(vae)),
}


@pytest.mark.parametrize("name", ["2d", slow("3d"), slow("fused")])
def test_batches_equal_single_clips_of_the_stock_vae(tiny_folder, name, monkeypatch):
    """Slow: what GPUs run."""
    monkeypatch.setattr(
        torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True)
    )
    load = {"subfolder": "vae", "dtype": torch.float64}
    stock = AutoencoderKLHunyuanVideo15.from_pretrained(tiny_folder, **load)
    batched = ADAPTED[name](AutoencoderKLHunyuanVideo15.from_pretrained(tiny_folder, **load))
    clips = torch.randn(
        3, 3, 5, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    with torch.no_grad():
        modes = batched.encode(clips).latent_dist.mode()
        singles = torch.cat([stock.encode(clip).latent_dist.mode() for clip in clips.split(1)])
        torch.testing.assert_close(modes, singles, rtol=0, atol=1e-12)
        decoded = torch.cat([stock.decode(mode).sample for mode in singles.split(1)])
        torch.testing.assert_close(batched.decode(modes).sample, decoded, rtol=0, atol=1e-12)


def test_tiles_are_decoded_without_the_compiler(tiny_folder, monkeypatch):
    """They come in several sizes, and each would need graphs of its own."""
    vae = AutoencoderKLHunyuanVideo15.from_pretrained(
        tiny_folder, subfolder="vae", dtype=torch.float64
    )
    latents = torch.randn(
        1, vae.config.latent_channels, 2, 3, 2, generator=torch.Generator().manual_seed(0)
    ).double()
    vae.enable_tiling(
        tile_latent_min_height=2,
        tile_latent_min_width=2,
        tile_sample_min_height=2 * vae.spatial_compression_ratio,
        tile_sample_min_width=2 * vae.spatial_compression_ratio,
    )
    expected = vae.decode(latents).sample
    calls = []

    def recorded(call, dynamic):
        def compiled(*args):
            calls.append(call)
            return call(*args)

        return compiled

    monkeypatch.setattr(torch, "compile", recorded)
    fuse_decoder(vae)
    torch.testing.assert_close(vae.decode(latents).sample, expected, rtol=0, atol=1e-12)
    assert not calls
    vae.disable_tiling()
    vae.decode(latents)
    assert calls


@pytest.mark.parametrize("compiled", [False, True])
def test_the_decoder_is_compiled_off_the_cpu_if_asked_for(tiny_folder, compiled, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    backbone = open_backbone(tiny_folder, "meta")
    backbone.compiled = compiled
    assert ("forward" in vars(backbone.vae.decoder.conv_out)) == compiled


def test_no_convolution_in_three_dimensions_is_left_on_a_cpu(tiny_folder, monkeypatch):
    """Those of 1 x 1 x 1 are products of matrices in any case."""
    vae = open_backbone(tiny_folder).vae
    plain = torch.nn.Conv3d.forward

    def small(layer, x):
        assert layer.kernel_size == (1, 1, 1)
        return plain(layer, x)

    monkeypatch.setattr(torch.nn.Conv3d, "forward", small)
    vae.decode(vae.encode(torch.zeros(1, 3, 5, 16, 16)).latent_dist.mode())


def test_clips_are_tiled_unless_their_decode_fits(tiny_folder, monkeypatch):
    backbone = open_backbone(tiny_folder)
    plain = type(backbone.vae).decode
    tiled = []

    def recorded(vae, *args, **kwargs):
        tiled.append(vae.use_tiling)
        return plain(vae, *args, **kwargs)

    monkeypatch.setattr(type(backbone.vae), "decode", recorded)
    latents = torch.zeros(2, *backbone.latent_shape(5, 16, 16))
    needed = latents[:, 0].numel() * UNTILED.eager / 1e9
    for gb in (0, 0.99 * needed, 1.01 * needed):
        backbone.decode_gb = gb
        backbone.decode(latents)
    assert tiled == [True, True, False]
    backbone.encode_video(torch.zeros(1, 5, 16, 16, 3, dtype=torch.uint8))
    assert backbone.vae.use_tiling
