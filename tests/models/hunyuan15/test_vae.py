"""The patched VAE mask: the stock result for one clip, and the same for each clip of a batch."""

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

from sage_grpo.models.hunyuan15.vae import allow_batches, causal_frame_mask


def test_mask_is_the_stock_mask_with_a_head_axis():
    args = (3, 4, torch.float32, torch.device("cpu"))
    stock = HunyuanVideo15AttnBlock.prepare_causal_attention_mask(*args)
    assert torch.equal(causal_frame_mask(*args)[0, 0], stock)


def test_batches_equal_single_clips_of_the_stock_vae(tiny_folder):
    load = {"subfolder": "vae", "dtype": torch.float64}
    stock = AutoencoderKLHunyuanVideo15.from_pretrained(tiny_folder, **load)
    batched = allow_batches(AutoencoderKLHunyuanVideo15.from_pretrained(tiny_folder, **load))
    clips = torch.randn(3, 3, 5, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        modes = batched.encode(clips).latent_dist.mode()
        singles = torch.cat([stock.encode(clip).latent_dist.mode() for clip in clips.split(1)])
        torch.testing.assert_close(modes, singles, rtol=0, atol=1e-12)
        decoded = torch.cat([stock.decode(mode).sample for mode in singles.split(1)])
        torch.testing.assert_close(batched.decode(modes).sample, decoded, rtol=0, atol=1e-12)
