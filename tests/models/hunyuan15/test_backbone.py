"""The backbone matches the stock pipeline: same embeddings, velocities, sampling and pixels."""

from itertools import pairwise

import pytest
import torch

from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import BrokenClip, Guidance
from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.models.hunyuan15.text import TextConditioning
from sage_grpo.models.registry import open_backbone
from tests.smallest_run import slow

QUOTED = Request('a green letter "B" moving right')
PLAIN = Request("a red circle moving left")
NEGATIVE = Request("")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def euler_reference(backbone, noise, cond, guidance, num_steps, shift):
    """The plain Euler sampler, latents in fp32."""
    u = torch.linspace(1, 0, num_steps + 1)
    sigmas = shift * u / (1 + (shift - 1) * u)
    x = noise
    for sigma, after in pairwise(sigmas):
        with torch.no_grad():
            x = x + (after - sigma) * backbone.velocity(x, sigma, cond, guidance)
    return x


@pytest.fixture(scope="module")
def backbone(tiny_folder):
    return Hunyuan15(tiny_folder, dtype=torch.float64)


@pytest.mark.parametrize("request_", [PLAIN, QUOTED], ids=["plain", "quoted"])
@pytest.mark.parametrize("scale", [1.0, 6.0])
@pytest.mark.parametrize("batch", [slow(1), 3])
def test_euler_sampling_gives_the_stock_latents(backbone, stock, request_, scale, batch):
    noise = draw(batch, *backbone.latent_shape(5, 16, 24))
    stock.guider.guidance_scale = scale
    expected = stock(
        [request_.text] * batch,
        latents=noise,
        num_inference_steps=4,
        output_type="latent",
        height=16,
        width=24,
    ).frames
    cond, negative = backbone.encode([request_, NEGATIVE])
    latents = euler_reference(
        backbone, noise, cond, Guidance(scale, negative), 4, stock.scheduler.config.shift
    )
    torch.testing.assert_close(latents.double(), expected, rtol=0, atol=2e-6)


def test_decoded_clip_is_the_stock_clip_to_the_last_bit(backbone, stock):
    noise = draw(1, *backbone.latent_shape(9, 32, 32))
    call = {
        "prompt": PLAIN.text,
        "latents": noise,
        "num_inference_steps": 2,
        "height": 32,
        "width": 32,
    }
    latents = stock(**call, output_type="latent").frames
    expected = stock(**call, output_type="pt").frames  # (1, F, 3, Y, X) in [0, 1]
    clip = backbone.decode(latents)
    assert clip.dtype == torch.uint8
    assert clip.shape == (1, 9, 32, 32, 3)
    assert clip.float().std() > 5
    assert torch.equal(clip, (expected * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2))


def test_pixels_that_are_not_finite_are_no_clip(backbone):
    latents = draw(3, *backbone.latent_shape(5, 16, 16))
    assert backbone.decode(latents).shape == (3, 5, 16, 16, 3)
    latents[1, 0, 0, 0, 0] = torch.nan
    with pytest.raises(BrokenClip, match="not finite"):
        backbone.decode(latents)


def test_the_vae_is_as_precise_as_its_device_affords(tiny_folder):
    assert Hunyuan15(tiny_folder, "cuda", torch.bfloat16).vae_dtype == torch.float16
    assert Hunyuan15(tiny_folder, "cpu", torch.bfloat16).vae_dtype == torch.float32
    assert Hunyuan15(tiny_folder, "cuda", torch.float32).vae_dtype == torch.float32
    assert Hunyuan15(tiny_folder, dtype=torch.bfloat16).vae.dtype == torch.float32


@torch.no_grad()
def test_a_clip_beyond_the_range_of_fp16_is_decoded_in_fp32(tiny_folder):
    small = Hunyuan15(tiny_folder)
    small.vae.decoder.conv_in.conv.weight.mul_(3e4)
    small.vae.half()
    latents = draw(3, *small.latent_shape(1, 8, 8))
    latents[1] *= 1e-6
    broken = ~small._pixels(latents).isfinite().flatten(1).all(1)
    assert broken.tolist() == [True, False, True]  # in fp16 alone
    clips = small.decode(latents)
    assert small.vae.dtype == torch.float16
    assert torch.equal(clips[1:2], small.decode(latents[1:2]))
    small.vae.float()
    assert torch.equal(clips[broken], small.decode(latents[broken]))
    latents[2] = torch.nan
    small.vae.half()
    with pytest.raises(BrokenClip, match="not finite"):
        small.decode(latents)


def test_latents_are_scaled_once_each_way(backbone):
    assert backbone.vae.config.scaling_factor == 0.4
    clips = torch.randint(
        0, 256, (2, 5, 16, 16, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    latents = backbone.encode_video(clips)
    pixels = clips.permute(0, 4, 1, 2, 3).double() / 127.5 - 1
    with torch.no_grad():
        mode = backbone.vae.encode(pixels).latent_dist.mode()
        torch.testing.assert_close(latents, 0.4 * mode, rtol=0, atol=1e-6)
        decoded = (backbone.vae.decode(mode).sample / 2 + 0.5).clamp(0, 1)
    levels = 255 * decoded.permute(0, 2, 3, 4, 1)
    assert (backbone.decode(0.4 * mode) - levels).abs().max() <= 0.5 + 1e-4


@pytest.mark.parametrize("frames, latent_frames", [(1, 1), (5, 2), (9, 3)])
def test_clips_of_4n_plus_1_frames_keep_their_shape(backbone, frames, latent_frames):
    clips = torch.zeros(2, frames, 16, 24, 3, dtype=torch.uint8)
    latents = backbone.encode_video(clips)
    assert latents.shape == (2, backbone.vae.config.latent_channels, latent_frames, 4, 6)
    assert latents.shape[1:] == backbone.latent_shape(frames, 16, 24)
    assert backbone.decode(latents).shape == clips.shape


@pytest.mark.parametrize(
    "size, message",
    [
        ((8, 32, 32), "num_frames 8 is not 4n .* nearest is 9"),
        ((0, 32, 32), "num_frames 0 is not 4n .* nearest is 1"),
        ((9, 30, 32), "height 30 is not a multiple of 4"),
        ((9, 32, 0), "width 0 is not a multiple of 4"),
    ],
)
def test_sizes_that_the_vae_cannot_hold_are_refused(backbone, size, message):
    with pytest.raises(ValueError, match=message):
        backbone.latent_shape(*size)
    with pytest.raises(ValueError, match=message):
        backbone.encode_video(torch.zeros(1, *size, 3, dtype=torch.uint8))


def test_guidance_extrapolates_from_the_negative_branch(backbone):
    x = draw(2, 8, 2, 4, 4)
    cond, negative = backbone.encode([QUOTED, NEGATIVE])
    with torch.no_grad():
        positive = backbone.velocity(x, 0.6, cond, Guidance())
        unguided = backbone.velocity(x, 0.6, negative, Guidance())
        guided = backbone.velocity(x, 0.6, cond, Guidance(3.5, negative))
    assert (positive - unguided).abs().max() > 1e-3
    torch.testing.assert_close(guided, unguided + 3.5 * (positive - unguided), rtol=0, atol=1e-12)


def test_guidance_without_a_negative_is_refused(backbone):
    [cond] = backbone.encode([PLAIN])
    with pytest.raises(ValueError, match=r"guidance 6\.0 needs a negative"):
        backbone.velocity(draw(1, 8, 2, 4, 4), 0.5, cond, Guidance(6.0))


def test_gradients_reach_both_guidance_branches(backbone):
    cond, negative = (
        TextConditioning(encoded.text.clone().requires_grad_(), encoded.glyph)
        for encoded in backbone.encode([PLAIN, NEGATIVE])
    )
    x = draw(2, 8, 2, 4, 4)
    weight = draw(2, 8, 2, 4, 4, seed=1).double()

    def grads(scale):
        loss = (backbone.velocity(x, 0.6, cond, Guidance(scale, negative)) * weight).sum()
        return torch.autograd.grad(loss, (cond.text, negative.text))

    positive_at_3, negative_at_3 = grads(3.0)
    positive_at_5, negative_at_5 = grads(5.0)
    assert positive_at_3.abs().max() > 1e-4
    # d guided / d v_pos = scale and d guided / d v_neg = 1 - scale
    torch.testing.assert_close(positive_at_5, 5 / 3 * positive_at_3)
    torch.testing.assert_close(negative_at_5, 2 * negative_at_3)


def test_velocity_does_not_depend_on_the_batch(backbone):
    x = draw(3, 8, 2, 4, 4)
    sigmas = torch.tensor([0.9, 0.5, 0.1])
    [cond] = backbone.encode([QUOTED])
    with torch.no_grad():
        together = backbone.velocity(x, sigmas, cond, Guidance())
        alone = torch.cat(
            [backbone.velocity(x[i : i + 1], float(sigmas[i]), cond, Guidance()) for i in range(3)]
        )
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


def test_velocity_is_fp32_whatever_the_latents_are(tiny_folder):
    backbone = Hunyuan15(tiny_folder, dtype=torch.float32)
    [cond] = backbone.encode([PLAIN])
    velocity = backbone.velocity(draw(1, 8, 1, 2, 2).double(), 0.5, cond, Guidance())
    assert velocity.dtype == torch.float32


def test_missing_folder_is_one_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^Model folder '.*absent' does not exist; .*\.$"):
        open_backbone(tmp_path / "absent")
