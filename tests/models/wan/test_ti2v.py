"""Wan 2.2 TI2V with an image matches the stock image-to-video pipeline; one folder serves both tasks."""

import json
import shutil

import pytest
import torch
from PIL import Image

from sage_grpo.algo.sde import flow_sigmas
from sage_grpo.data.images import read_image
from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.embeddings import shared_or_stacked
from sage_grpo.models.registry import open_backbone
from sage_grpo.models.sample import integrate
from sage_grpo.models.wan.text import NUM_TOKENS
from sage_grpo.models.wan.ti2v import Ti2v
from tests.models.wan.pictures import requests_with_images
from tests.models.wan.test_backbone import NEGATIVE, PROMPT, Euler, draw

# frames, height and width: an odd number of latent frames, of rows and of columns of tokens
SIZE = (9, 96, 32)


@pytest.fixture(scope="module")
def requests(tmp_path_factory):
    """The prompt with one image and with another, both of the size of the clip, and without."""
    folder = tmp_path_factory.mktemp("images")
    return [*requests_with_images(folder, PROMPT.text, *SIZE[1:]), PROMPT]


@pytest.fixture(scope="module")
def backbone(ti2v_folder, requests):
    backbone = open_backbone(ti2v_folder, dtype=torch.float64)
    x = draw(1, *backbone.latent_shape(*SIZE))
    backbone.velocity(x, 0.5, *backbone.encode([PROMPT]), Guidance())  # the rotary tables
    return backbone


@pytest.fixture
def stock(stock_image_to_video, ti2v_folder):
    pipe = stock_image_to_video.from_pretrained(ti2v_folder)
    for part in (pipe.transformer, pipe.text_encoder, pipe.vae):
        part.double()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def stock_velocity(stock, x, first, sigma, text):
    """As the stock pipeline calls the transformer: the clean frame in place of the first, a timestep per token."""
    latents = torch.cat([first.expand(len(x), -1, -1, -1, -1), x], dim=2)
    per_frame = 1000 * torch.as_tensor(sigma, dtype=torch.float32).reshape(-1, 1).expand(len(x), 1)
    frames, rows, columns = latents.shape[2:]
    timestep = per_frame.repeat(1, frames).repeat_interleave(rows * columns // 4, 1)
    timestep[:, : rows * columns // 4] = 0
    text = text.expand(len(x), -1, -1)
    return stock.transformer(latents, timestep, text, return_dict=False)[0][:, :, 1:]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sigma", [0.02, 1.0, "each"])
def test_velocity_of_the_free_frames_is_the_stock_one(
    backbone,
    stock,
    requests,
    exact,
    batch,
    sigma,
):
    levels = torch.tensor([0.9, 0.5, 0.1])[:batch] if sigma == "each" else sigma
    [cond] = backbone.encode(requests[:1])
    shape = backbone.free_shape(backbone.latent_shape(*SIZE), cond)
    assert shape == (4, 2, 6, 2)
    x = draw(batch, *shape)
    text, _ = stock.encode_prompt(
        PROMPT.text, max_sequence_length=NUM_TOKENS, do_classifier_free_guidance=False
    )
    with torch.no_grad():
        expected = stock_velocity(stock, x, cond.first, levels, text)
        velocity = backbone.velocity(x, levels, cond, Guidance())
        without = backbone.velocity(x, levels, *backbone.encode([PROMPT]), Guidance())
    assert expected.std() > 0.1 and (velocity - without).abs().max() > 1e-3
    torch.testing.assert_close(velocity, expected, rtol=0, atol=1e-10)


def test_clips_of_several_images_share_a_forward(backbone, requests):
    """With prompts_per_forward, each clip has the first frame of its own request."""
    conditions = backbone.encode(requests[:2])
    x = draw(2, *backbone.free_shape(backbone.latent_shape(*SIZE), conditions[0]))
    with torch.no_grad():
        both = backbone.velocity(x, 0.5, shared_or_stacked(conditions), Guidance())
        alone = [
            backbone.velocity(clip[None], 0.5, cond, Guidance())
            for clip, cond in zip(x, conditions, strict=True)
        ]
    torch.testing.assert_close(both, torch.cat(alone), rtol=0, atol=1e-6)
    whole = backbone.full_latents(x, shared_or_stacked(conditions))
    for clip, cond, free in zip(whole, conditions, x, strict=True):
        assert torch.equal(clip[:, :1], cond.first) and torch.equal(clip[:, 1:], free)


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_euler_sampling_gives_the_stock_latents(
    backbone,
    stock,
    requests,
    exact,
    monkeypatch,
    scale,
):
    """The stock pipeline makes the condition in fp32, so it is compared, and then ours is used."""
    cond, negative = backbone.encode([requests[0], NEGATIVE])
    shape = backbone.latent_shape(*SIZE)
    noise = draw(3, *shape)
    prepare = stock.prepare_latents

    def prepare_latents(*args):
        _, condition, mask = prepare(*args)
        own = cond.first.expand(3, -1, -1, -1, -1)
        torch.testing.assert_close(condition.double(), own, rtol=0, atol=1e-5)
        return noise, own, mask

    monkeypatch.setattr(stock, "scheduler", Euler(shift=5.0))
    monkeypatch.setattr(stock, "prepare_latents", prepare_latents)
    frames, height, width = SIZE
    expected = stock(
        image=requests[0].image.cropped(),
        prompt=[PROMPT.text] * 3,
        negative_prompt=[NEGATIVE.text] * 3,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=4,
        guidance_scale=scale,
        latents=noise,
        output_type="latent",
    ).frames
    with torch.no_grad():
        guidance = Guidance(scale, negative)
        free = integrate(backbone, flow_sigmas(4, 5.0), noise[:, :, 1:], cond, guidance)
    latents = backbone.full_latents(free, cond)
    assert expected.std() > 0.3 and expected.shape[1:] == shape
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-10)


def test_a_clip_of_one_frame_has_nothing_to_sample(backbone, requests):
    [cond] = backbone.encode(requests[:1])
    with pytest.raises(ValueError, match="num_frames is 1, which is the image itself"):
        backbone.free_shape(backbone.latent_shape(1, *SIZE[1:]), cond)


@pytest.mark.parametrize(
    "shape, size", [((500, 100), (64, 32)), ((100, 500), (32, 64)), ((64, 64), (32, 32))]
)
def test_the_size_follows_the_image(backbone, tmp_path, shape, size):
    height, width = shape
    Image.new("RGB", (width, height)).save(tmp_path / "image.png")
    request = Request("a boat", image=read_image(tmp_path / "image.png", "test"))
    assert backbone.default_size(request) == size
    assert backbone.default_size(PROMPT) == (32, 32)


@pytest.mark.parametrize("pipeline", ["WanPipeline", "WanImageToVideoPipeline"])
def test_the_setting_chooses_the_backbone_whatever_the_pipeline(ti2v_folder, tmp_path, pipeline):
    folder = shutil.copytree(ti2v_folder, tmp_path / "model")
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": pipeline}))
    assert type(open_backbone(folder)) is Ti2v
