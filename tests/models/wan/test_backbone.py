"""The backbone matches the stock pipeline: same embeddings, velocities, sampling and pixels."""

from dataclasses import replace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

from sage_grpo.algo.sde import flow_sigmas
from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.registry import open_backbone
from sage_grpo.models.sample import integrate
from sage_grpo.models.wan.text import NUM_TOKENS

PROMPT = Request("a red  circle &amp; a green square moving left")
NEGATIVE = Request("the letter")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module", params=["wan_folder", "ti2v_folder"])
def folder(request):
    """Wan 2.1, and Wan 2.2 TI2V without an image; test_ti2v.py gives it one."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def backbone(folder):
    backbone = open_backbone(folder, dtype=torch.float64)
    x = draw(1, *backbone.latent_shape(1, 32, 32))
    [cond] = backbone.encode([PROMPT])
    backbone.velocity(x, 0.5, cond, Guidance())  # makes the rotary tables, before `exact`
    return backbone


def sized(backbone, frames, rows, columns):
    """Frames, height and width of a clip with so many rows and columns of tokens."""
    return frames, rows * backbone.multiple, columns * backbone.multiple


@pytest.fixture(scope="module")
def stock(folder):
    """The stock pipeline in fp64; `dtype=` would leave some of its modules in fp32."""
    pipe = WanPipeline.from_pretrained(folder)
    for part in (pipe.transformer, pipe.text_encoder, pipe.vae):
        part.double()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sigma", [0.02, 0.7, 1.0])
def test_velocity_is_the_stock_one(backbone, stock, exact, batch, sigma):
    x = draw(batch, *backbone.latent_shape(*sized(backbone, 9, 2, 3)))
    [cond] = backbone.encode([PROMPT])
    text, _ = stock.encode_prompt(
        PROMPT.text, max_sequence_length=NUM_TOKENS, do_classifier_free_guidance=False
    )
    with torch.no_grad():
        timestep = torch.full((batch,), 1000.0) * torch.tensor(sigma)
        if stock.config.expand_timesteps:  # one for each token
            timestep = timestep[:, None].expand(-1, 3 * 2 * 3)
        expected = stock.transformer(x, timestep, text.expand(batch, -1, -1), return_dict=False)[0]
        velocity = backbone.velocity(x, sigma, cond, Guidance())
    assert expected.std() > 0.1 and velocity.dtype == torch.float64
    torch.testing.assert_close(velocity, expected, rtol=0, atol=1e-10)


def test_the_padding_is_a_part_of_the_model(backbone, stock):
    [cond] = backbone.encode([PROMPT])
    text, _ = stock.encode_prompt(
        PROMPT.text, max_sequence_length=NUM_TOKENS, do_classifier_free_guidance=False
    )
    torch.testing.assert_close(cond.text, text[0], rtol=0, atol=1e-10)
    length = backbone.num_tokens(cond)
    assert 10 < length < 30 and cond.text.shape[0] == NUM_TOKENS and not cond.text[length:].any()
    x = draw(1, *backbone.latent_shape(*sized(backbone, 5, 2, 2)))
    with torch.no_grad():
        short_text = replace(cond, text=cond.text[:length])
        short = backbone.velocity(x, 0.5, short_text, Guidance())
        full = backbone.velocity(x, 0.5, cond, Guidance())
    assert (short - full).abs().max() > 1e-3


class Euler(FlowMatchEulerDiscreteScheduler):
    """Plain Euler steps in fp64 over our noise levels; the stock class rounds every state to fp32."""

    def set_timesteps(self, num_inference_steps, device):
        self.sigmas = flow_sigmas(num_inference_steps, self.config.shift)
        self.timesteps = 1000 * self.sigmas[:-1].to(torch.float32)
        self.taken = 0

    def step(self, velocity, timestep, x, return_dict):
        before, after = self.sigmas[self.taken : self.taken + 2]
        self.taken += 1
        return (x + (after - before) * velocity,)


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_euler_sampling_gives_the_stock_latents(backbone, stock, exact, monkeypatch, scale):
    monkeypatch.setattr(stock, "scheduler", Euler(shift=3.0))
    # the stock method would round them to fp32
    monkeypatch.setattr(stock, "prepare_latents", lambda *args: args[-1])
    frames, height, width = sized(backbone, 5, 2, 3)
    noise = draw(2, *backbone.latent_shape(frames, height, width))
    cond, negative = backbone.encode([PROMPT, NEGATIVE])
    expected = stock(
        prompt=[PROMPT.text] * 2,
        negative_prompt=[NEGATIVE.text] * 2,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=4,
        guidance_scale=scale,
        latents=noise,
        output_type="latent",
    ).frames
    with torch.no_grad():
        latents = integrate(backbone, flow_sigmas(4, 3.0), noise, cond, Guidance(scale, negative))
    assert expected.std() > 0.3
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-10)


def test_velocity_points_from_data_to_noise(backbone):
    """With velocity v = z - x0 the first Euler step over all noise levels, from 1 to 0, is x - v."""
    x = draw(1, *backbone.latent_shape(1, 32, 32))
    [cond] = backbone.encode([PROMPT])
    with torch.no_grad():
        v = backbone.velocity(x, 1.0, cond, Guidance())
        end = integrate(backbone, flow_sigmas(1, 3.0), x, cond, Guidance())
    torch.testing.assert_close(end, x - v)


def test_decoded_clip_is_the_stock_clip(backbone, stock):
    call = {
        "prompt": PROMPT.text,
        "num_inference_steps": 2,
        "height": 32,
        "width": 32,
        "num_frames": 9,
        "latents": draw(1, *backbone.latent_shape(9, 32, 32)),
        "guidance_scale": 1.0,
    }
    latents = stock(**call, output_type="latent").frames
    frames = stock(**call, output_type="pt").frames
    clip = backbone.decode(latents)
    assert clip.dtype == torch.uint8 and clip.shape == (1, 9, 32, 32, 3) and clip.float().std() > 5
    difference = clip.double() - (frames * 255).permute(0, 1, 3, 4, 2)
    assert difference.abs().max() <= 0.5 + 1e-4


def test_latents_are_normalized_per_channel(backbone):
    clips = torch.randint(
        0,
        256,
        (2, *sized(backbone, 5, 2, 1), 3),
        generator=torch.Generator().manual_seed(0),
        dtype=torch.uint8,
    )
    latents = backbone.encode_video(clips)
    pixels = (clips.permute(0, 4, 1, 2, 3) / 127.5 - 1).double()
    with torch.no_grad():
        mode = backbone.vae.encode(pixels).latent_dist.mode()
    mean = torch.tensor([0.5, -1.0, 0.1, 2.0]).double().view(4, 1, 1, 1)
    std = torch.tensor([0.4, 2.0, 1.5, 0.7]).double().view(4, 1, 1, 1)
    torch.testing.assert_close(latents, (mode - mean) / std, rtol=0, atol=1e-5)
    assert latents.shape[1:] == backbone.latent_shape(*sized(backbone, 5, 2, 1)) == (4, 2, 4, 2)
    with torch.no_grad():
        decoded = (backbone.vae.decode(mode).sample / 2 + 0.5).clamp(0, 1)
    levels = 255 * decoded.permute(0, 2, 3, 4, 1)
    assert (backbone.decode(latents) - levels).abs().max() <= 0.5 + 1e-3


def test_a_decode_beyond_decode_gb_is_tiled(folder):
    backbone = open_backbone(folder)
    latents = draw(1, *backbone.latent_shape(1, 288, 288)).float()
    needed = (288 // backbone.multiple) ** 2 * backbone.untiled.eager / 1e9
    clips = {}
    for gb in (0.99 * needed, 1.01 * needed):
        backbone.decode_gb = gb
        clips[backbone.vae.use_tiling] = backbone.decode(latents)
    assert clips.keys() == {True, False}
    assert not torch.equal(clips[True], clips[False])


@pytest.mark.parametrize(
    "size, message",
    [
        ((8, 32, 32), "num_frames 8 is not 4n .* nearest is 9"),
        ((9, 24, 32), "height 24 is not a multiple of (16|32)"),
    ],
)
def test_sizes_that_the_model_cannot_make_are_refused(backbone, size, message):
    with pytest.raises(ValueError, match=message):
        backbone.latent_shape(*size)


def test_the_published_models_are_known_without_a_folder(tmp_path):
    small = open_backbone(tmp_path / "absent", version="wan21-1.3b", complete=False)
    large = open_backbone(tmp_path / "absent", version="wan21-14b", complete=False)
    assert str(small.sampling) == "81 frames of 480 x 832, 50 steps, shift 3, guidance 5"
    assert small.sampling.fps == 16
    assert small.rollout_size == (81, 480, 832)
    sizes = small.architecture()
    assert 1.41e9 < sizes.parameters < 1.43e9 and sizes.video_tokens(81, 480, 832) == 32760
    assert 14.2e9 < large.architecture().parameters < 14.4e9
    both = open_backbone(tmp_path / "absent", version="wan22-ti2v-5b", complete=False)
    assert str(both.sampling) == "121 frames of 704 x 1280, 50 steps, shift 5, guidance 5"
    assert both.sampling.fps == 24
    sizes = both.architecture()
    assert 4.9e9 < sizes.parameters < 5.1e9 and sizes.video_tokens(121, 704, 1280) == 27280
    tall = open_backbone(tmp_path / "absent", version="wan21-14b-720p", complete=False).sampling
    assert (tall.height, tall.width, tall.shift) == (720, 1280, 5.0)


def test_the_planner_counts_the_cross_attention(tmp_path):
    """Operations of a forward, counted by hand: one clip of 81 x 480 x 832, 30 blocks of width 1536."""
    sizes = open_backbone(tmp_path / "absent", version="wan21-1.3b", complete=False).architecture()
    n = 32760  # tokens
    d = 1536  # width
    work = sizes.forward(n, 150)
    assert work.attention == 30 * 4 * d * n * (n + 512)
    assert work.linear == pytest.approx(30 * 2 * n * (6 * d * d + 2 * d * 8960))
    assert sizes.sequence(n, 150) == n
