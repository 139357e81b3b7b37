"""Wan 2.2 A14B matches the stock pipelines on both sides of the boundary, with a guidance for each transformer."""

import json
import shutil

import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v

from sage_grpo.algo.sde import flow_sigmas
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.embeddings import shared_or_stacked
from sage_grpo.models.registry import open_backbone
from sage_grpo.models.sample import integrate
from sage_grpo.models.wan.a14b import A14b
from sage_grpo.models.wan.animate import AnimatingA14b
from sage_grpo.models.wan.text import NUM_TOKENS
from tests.models.wan.pictures import requests_with_images
from tests.models.wan.test_backbone import NEGATIVE, PROMPT, Euler, draw

# frames, height and width: odd numbers of latent frames, of rows and of columns of tokens
SIZE = (9, 48, 16)
PIPELINES = {"a14b_folder": WanPipeline, "animating_folder": WanImageToVideoPipeline}


@pytest.fixture(autouse=True)
def without_ftfy(monkeypatch):
    """The stock image-to-video pipeline cannot clean a prompt without ftfy, which is optional; that of text can."""
    monkeypatch.setattr(pipeline_wan_i2v, "prompt_clean", pipeline_wan.prompt_clean)


@pytest.fixture(scope="module", params=PIPELINES)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def requests(kind, tmp_path_factory):
    """The prompt, for image to video twice, with images of the size of the clip."""
    if kind == "a14b_folder":
        return [PROMPT]
    return requests_with_images(tmp_path_factory.mktemp("images"), PROMPT.text, *SIZE[1:])


@pytest.fixture(scope="module")
def backbone(kind, request, requests):
    backbone = open_backbone(request.getfixturevalue(kind), dtype=torch.float64)
    x = draw(1, *backbone.latent_shape(*SIZE))
    backbone.velocity(x, 0.5, *backbone.encode(requests[:1]), Guidance())  # the rotary tables
    return backbone


@pytest.fixture(scope="module")
def stock(kind, request):
    pipe = PIPELINES[kind].from_pretrained(request.getfixturevalue(kind))
    for part in (pipe.transformer, pipe.transformer_2, pipe.text_encoder, pipe.vae):
        part.double()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def stock_condition(stock, request, cond, x):
    """Mask and condition channels as the stock pipeline makes them, after a comparison with ours, which are in fp64."""
    frames, height, width = SIZE
    image = stock.video_processor.preprocess(request.image.cropped(), height=height, width=width)
    args = (image, len(x), 4, height, width, frames, torch.float32, torch.device("cpu"))
    _, condition = stock.prepare_latents(*args)
    own = cond.image.expand(len(x), -1, -1, -1, -1)
    torch.testing.assert_close(condition[:, 4:].double(), own, rtol=0, atol=1e-5)
    return torch.cat([condition[:, :4].double(), own], dim=1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sigma", [0.95, 0.4, "each"])
def test_velocity_is_that_of_the_stock_transformer_of_the_side(
    backbone, stock, requests, exact, batch, sigma
):
    levels = torch.tensor([0.5, 0.95, 0.2])[:batch]
    if sigma != "each":
        levels = torch.full((batch,), sigma)
    x = draw(batch, *backbone.latent_shape(*SIZE))
    cond, negative = backbone.encode([requests[0], NEGATIVE])
    inputs = x
    if requests[0].image:
        inputs = torch.cat([x, stock_condition(stock, requests[0], cond, x)], dim=1)

    texts = stock.encode_prompt(
        PROMPT.text, NEGATIVE.text, max_sequence_length=NUM_TOKENS, do_classifier_free_guidance=True
    )
    expected = []
    with torch.no_grad():
        for row in range(batch):
            is_high = levels[row] * 1000 >= stock.config.boundary_ratio * 1000
            transformer = stock.transformer if is_high else stock.transformer_2
            scale = 4.0 if is_high else 2.0
            positive, unguided = (
                transformer(inputs[row][None], 1000 * levels[row][None], text, return_dict=False)[0]
                for text in texts
            )
            expected.append(unguided + scale * (positive - unguided))
        guidance = Guidance(4.0, negative, scale_2=2.0)
        velocity = backbone.velocity(x, levels, cond, guidance)
        alone = backbone.branch(x, levels, cond)
    torch.testing.assert_close(velocity, torch.cat(expected), rtol=0, atol=1e-10)
    assert velocity.dtype == torch.float64 and (velocity - alone).abs().max() > 1e-3


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("scale_2", [None, 2.0])
def test_euler_sampling_across_the_boundary_gives_the_stock_latents(
    backbone, stock, requests, exact, monkeypatch, batch, scale_2
):
    noise = draw(batch, *backbone.latent_shape(*SIZE))
    cond, negative = backbone.encode([requests[0], NEGATIVE])
    sigmas = flow_sigmas(6, 3.0)
    is_high = sigmas[:-1] >= backbone.boundary
    assert is_high.sum() == 2 and (~is_high).sum() == 4

    monkeypatch.setattr(stock, "scheduler", Euler(shift=3.0))
    call = {}
    if requests[0].image:
        call["image"] = requests[0].image.cropped()
        condition = stock_condition(stock, requests[0], cond, noise)
        # the stock method would round to fp32
        monkeypatch.setattr(stock, "prepare_latents", lambda *args: (noise, condition))
    else:
        monkeypatch.setattr(stock, "prepare_latents", lambda *args: args[-1])
    frames, height, width = SIZE
    expected = stock(
        prompt=[PROMPT.text] * batch,
        negative_prompt=[NEGATIVE.text] * batch,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=6,
        guidance_scale=4.0,
        guidance_scale_2=scale_2,
        latents=noise,
        output_type="latent",
        **call,
    ).frames
    with torch.no_grad():
        guidance = Guidance(4.0, negative, scale_2=scale_2)
        latents = integrate(backbone, sigmas, noise, cond, guidance)
    assert expected.std() > 0.3
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-10)


def test_a_clip_in_a_mixed_batch_has_the_bits_of_one_side_alone(backbone, requests):
    """Both transformers run the whole batch, so that training rounds as the rollout did, also with one guidance off."""
    backbone = type(backbone)(backbone.folder)  # fp32
    x = draw(2, *backbone.latent_shape(*SIZE)).float()
    cond, negative = backbone.encode([requests[0], NEGATIVE])
    guidance = Guidance(1.0, negative, scale_2=3.0)
    with torch.no_grad():
        mixed = backbone.velocity(x, torch.tensor([0.95, 0.4]), cond, guidance)
        high = backbone.velocity(x, torch.tensor([0.95, 0.95]), cond, guidance)
        low = backbone.velocity(x, torch.tensor([0.4, 0.4]), cond, guidance)
    assert torch.equal(mixed[0], high[0]) and torch.equal(mixed[1], low[1])
    assert not torch.equal(high, low)


@pytest.mark.parametrize("kind", ["animating_folder"], indirect=True, scope="module")
def test_clips_of_several_images_share_a_forward(backbone, requests):
    conditions = backbone.encode(requests)
    x = draw(2, *backbone.latent_shape(5, *SIZE[1:]))  # shorter than the longest clip
    with torch.no_grad():
        both = backbone.velocity(x, 0.5, shared_or_stacked(conditions), Guidance())
        alone = [
            backbone.velocity(clip[None], 0.5, cond, Guidance())
            for clip, cond in zip(x, conditions, strict=True)
        ]
    torch.testing.assert_close(both, torch.cat(alone), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="num_frames 13 is more than 9"):
        backbone.latent_shape(13, *SIZE[1:])


@pytest.mark.parametrize("kind", ["animating_folder"], indirect=True, scope="module")
def test_the_condition_of_a_shorter_clip_is_the_beginning_of_a_longer_one(
    backbone, requests, stock
):
    _, height, width = SIZE
    [cond] = backbone.encode(requests[:1])
    image = stock.video_processor.preprocess(
        requests[0].image.cropped(), height=height, width=width
    )
    args = (image, 1, 4, height, width, 5, torch.float32, torch.device("cpu"))
    _, condition = stock.prepare_latents(*args)
    torch.testing.assert_close(condition[0, 4:].double(), cond.image[:, :2], rtol=0, atol=1e-5)
    x = draw(1, *backbone.latent_shape(5, height, width))
    assert torch.equal(backbone.model_input(x, cond)[:, 4:8], condition[:, :4].double())


# Folders


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "name, version, kind, sampling",
    [
        ("a14b_folder", "wan22-t2v-a14b", A14b, "480 x 832, 40 steps, shift 12, guidance 4 and 3"),
        (
            "animating_folder",
            "wan22-i2v-a14b",
            AnimatingA14b,
            "480 x 832, 40 steps, shift 5, guidance 3.5 and 3.5",
        ),
    ],
)
def test_folder_or_version_choose_the_backbone(request, tmp_path, name, version, kind, sampling):
    assert type(open_backbone(request.getfixturevalue(name))) is kind
    published = open_backbone(tmp_path / "absent", version=version, complete=False)
    assert type(published) is kind and str(published.sampling) == f"81 frames of {sampling}"
    large = open_backbone(tmp_path / "absent", version=f"{version}-720p", complete=False)
    assert large.sampling.height == 720
    sizes = published.architecture()
    assert 14.2e9 < sizes.parameters < 14.4e9 and sizes.experts == 2
    assert sizes.boundary == published.boundary == (0.875 if kind is A14b else 0.9)


@pytest.mark.parametrize(
    "file, values, words",
    [
        ("model_index.json", {"boundary_ratio": 1.5}, "boundary_ratio 1.5; it must be a number"),
        ("model_index.json", {"boundary_ratio": "x"}, "boundary_ratio 'x'; it must be a number"),
        ("transformer_2/config.json", {"num_layers": 3}, "a transformer_2 of different sizes"),
        ("transformer/config.json", {"image_dim": 1280}, "is of an image-to-video transformer"),
    ],
)
def test_an_odd_folder_is_refused_in_a_sentence(a14b_folder, tmp_path, file, values, words):
    folder = shutil.copytree(a14b_folder, tmp_path / "model")
    change(folder / file, **values)
    if "image_dim" in values:
        change(folder / "transformer_2" / "config.json", **values)
    with pytest.raises(ValueError, match=words) as error:
        open_backbone(folder).architecture()
    assert len(str(error.value).splitlines()) == 1


def test_a_folder_without_the_second_transformer_is_incomplete(a14b_folder, tmp_path):
    folder = shutil.copytree(a14b_folder, tmp_path / "model")
    shutil.rmtree(folder / "transformer_2")
    with pytest.raises(FileNotFoundError, match="lacks transformer_2/config"):
        open_backbone(folder)


def test_image_to_video_of_wan_21_is_refused(animating_folder, tmp_path):
    folder = shutil.copytree(animating_folder, tmp_path / "model")
    change(folder / "model_index.json", boundary_ratio=None)
    with pytest.raises(ValueError, match="whose image encoder is not supported"):
        open_backbone(folder)
