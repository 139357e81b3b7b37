"""Image to video: tokens, first-frame latents, velocities and clips are those of the stock pipeline."""

import shutil
from dataclasses import replace

import pytest
import torch
from diffusers import HunyuanVideo15ImageToVideoPipeline
from PIL import Image
from safetensors.torch import load_file, save_file

from sage_grpo.data.images import read_image
from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.embeddings import shared_or_stacked
from sage_grpo.models.hunyuan15.image import ImageToVideo
from sage_grpo.models.registry import open_backbone
from sage_grpo.models.sample import integrate
from tests.smallest_run import slow

TEXTS = ("a red circle moving left", 'a green letter "B" moving right', "the square")
NEGATIVE = Request("")


@pytest.fixture(scope="module")
def backbone(i2v_folder):
    return open_backbone(i2v_folder, dtype=torch.float64)


@pytest.fixture
def stock(i2v_folder, monkeypatch):
    """The stock pipeline in fp64, its padding shortened; its scheduler would round each step to fp32."""
    pipe = HunyuanVideo15ImageToVideoPipeline.from_pretrained(i2v_folder, dtype=torch.float64)
    pipe.tokenizer_max_length = 24
    pipe.tokenizer_2_max_length = 24
    pipe.set_progress_bar_config(disable=True)

    def step(velocity, timestep, x, **_):
        i = pipe.scheduler.timesteps.tolist().index(timestep.item())
        return (x + (pipe.scheduler.sigmas[i + 1] - pipe.scheduler.sigmas[i]) * velocity,)

    monkeypatch.setattr(pipe.scheduler, "step", step)
    return pipe


@pytest.fixture(scope="module")
def requests(pictures, backbone):
    """One request per picture, each in the size that the model's rule gives it."""
    unsized = [
        Request(text, image=read_image(path, "here"))
        for text, path in zip(TEXTS, pictures, strict=True)
    ]
    return [request.sized(*backbone.default_size(request)) for request in unsized]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_pipeline_chooses_the_backbone_whatever_the_transformer_says(i2v_folder, tiny_folder):
    """Both folders have the same transformer, with the task_type of text to video."""
    assert isinstance(open_backbone(i2v_folder), ImageToVideo)
    assert not isinstance(open_backbone(tiny_folder), ImageToVideo)


def test_sizes_tokens_and_first_latents_are_the_stock_ones(backbone, stock, requests):
    sizes = set()
    for request in requests:
        picture = Image.open(request.image.path)
        height, width = stock.video_processor.calculate_default_height_width(
            picture.height, picture.width, 32
        )
        assert request.image.size == (height, width)
        cropped = stock.video_processor.resize(
            picture, height=height, width=width, resize_mode="crop"
        )
        with torch.no_grad():
            tokens = stock.encode_image(cropped, 1, torch.device("cpu"), torch.float64)
            latents = stock._get_image_latents(
                stock.vae, stock.video_processor, cropped, height, width, torch.device("cpu")
            )
        (cond,) = backbone.encode([request])
        assert cond.image.shape == (9, 16) and cond.first.shape == (8, height // 4, width // 4)
        torch.testing.assert_close(cond.image, tokens[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(cond.first, latents[0, :, 0], rtol=0, atol=1e-10)
        sizes.add((height, width))
    assert len(sizes) == 3


@pytest.mark.parametrize("scale", [slow(1.0), 6.0])
def test_every_clip_is_the_stock_clip(backbone, stock, requests, scale):
    """Each with its own image, text and size; a clip that saw another image would be far off.

    Slow: without guidance.
    """
    stock.guider.guidance_scale = scale
    clips_latents = []
    for number, request in enumerate(requests):
        noise = draw(1, *backbone.latent_shape(5, *request.image.size), seed=number)
        call = {"prompt": request.text, "latents": noise, "num_inference_steps": 3, "num_frames": 5}
        latents = stock(Image.open(request.image.path), **call, output_type="latent").frames
        cond, negative = backbone.encode([request, NEGATIVE])
        with torch.no_grad():
            x = integrate(backbone, stock.scheduler.sigmas, noise, cond, Guidance(scale, negative))
        torch.testing.assert_close(x, latents, rtol=0, atol=1e-10)
        clip = stock(Image.open(request.image.path), **call, output_type="pt").frames
        expected = (clip * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2)
        assert torch.equal(backbone.decode(x), expected)
        clips_latents.append(x)

    other = requests[1].sized(*requests[0].image.size).image
    cond, negative = backbone.encode([replace(requests[0], image=other), NEGATIVE])
    noise = draw(1, *backbone.latent_shape(5, *other.size))
    with torch.no_grad():
        wrong = integrate(backbone, stock.scheduler.sigmas, noise, cond, Guidance(scale, negative))
    assert (wrong - clips_latents[0]).abs().max() > 1e-3


def test_both_parts_of_the_image_and_its_mask_matter(backbone, requests):
    (cond,) = backbone.encode(requests[:1])
    x = draw(1, *backbone.latent_shape(5, *requests[0].image.size))
    seen = backbone.condition(torch.zeros(2, 9, *x.shape[2:], dtype=torch.float64), cond)
    assert torch.equal(seen[1, :-1, 0], cond.first) and not seen[:, :, 1:].any()
    assert seen[:, -1, 0].eq(1).all()
    with torch.no_grad():
        whole = backbone.velocity(x, 0.7, cond, Guidance())
        for changes in ({"image": draw(9, 16)}, {"first": cond.first * 2}):
            changed = backbone.velocity(x, 0.7, replace(cond, **changes), Guidance())
            assert (changed - whole).abs().max() > 1e-4


def test_both_branches_of_guidance_see_the_image(backbone, requests):
    cond, negative = backbone.encode([requests[0], NEGATIVE])
    assert not negative.image.numel() and not negative.first.numel()
    x = draw(2, *backbone.latent_shape(5, *requests[0].image.size))
    with torch.no_grad():
        guided = backbone.velocity(x, 0.6, cond, Guidance(3.5, negative))
        positive = backbone.branch(x, 0.6, cond)
        unguided = backbone.branch(x, 0.6, replace(negative, image=cond.image, first=cond.first))
    torch.testing.assert_close(guided, unguided + 3.5 * (positive - unguided), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sigma", [0.6, torch.tensor([0.6, 0.6, 0.2])])
def test_several_requests_in_one_forward_are_each_as_if_alone(backbone, pictures, sigma):
    """Two clips of one request and one of another, of equal shape, with guidance."""
    requests = [
        Request(TEXTS[0], image=read_image(path, "here")).sized(16, 16) for path in pictures[:2]
    ]
    first, second, negative = backbone.encode([*requests, NEGATIVE])
    conditions = [first, first, second]
    guidance = Guidance(3.0, negative)
    x = draw(3, *backbone.latent_shape(5, 16, 16))
    with torch.no_grad():
        joined = backbone.velocity(x, sigma, shared_or_stacked(conditions), guidance)
        levels = torch.as_tensor(sigma).expand(3)
        alone = [
            backbone.velocity(x[i : i + 1], levels[i], cond, guidance)
            for i, cond in enumerate(conditions)
        ]
    torch.testing.assert_close(joined, torch.cat(alone), rtol=0, atol=1e-12)
    assert (alone[1] - alone[2]).abs().max() > 1e-3


def test_images_are_cached_by_content_and_size(i2v_folder, pictures, tmp_path):
    """A copy under another name is the same image; another size or another image is not."""
    cached = open_backbone(i2v_folder, dtype=torch.float64, cache_dir=tmp_path / "cache")
    copy = shutil.copy(pictures[0], tmp_path / "copy.png")
    images = [read_image(path, "here") for path in (pictures[0], copy, pictures[1])]
    requests = [
        *(Request(TEXTS[0], image=image).sized(16, 16) for image in images),
        Request(TEXTS[0], image=images[0]).sized(16, 24),
        Request(TEXTS[0]),
    ]
    cached.prepare(requests)
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 4
    assert requests[0] == requests[1] and len({request.key for request in requests}) == 4

    again = open_backbone(i2v_folder, dtype=torch.float64, cache_dir=tmp_path / "cache")
    again.embeddings.encoder.encode = None  # nothing is encoded twice
    fresh = open_backbone(i2v_folder, dtype=torch.float64)
    for cond, expected in zip(again.encode(requests), fresh.encode(requests), strict=True):
        assert all(torch.equal(value, getattr(expected, n)) for n, value in vars(cond).items())


def test_another_vae_or_vision_model_is_another_encoder(i2v_folder, tmp_path):
    folder = shutil.copytree(i2v_folder, tmp_path / "model")
    before = open_backbone(folder).encoder().identity()
    for part, file in (("vae", "diffusion_pytorch_model"), ("image_encoder", "model")):
        path = folder / part / f"{file}.safetensors"
        tensors = load_file(path)
        name = next(iter(tensors))
        save_file(tensors | {name: tensors[name] + 1}, path)
        after = open_backbone(folder).encoder().identity()
        assert after != before
        before = after


def test_published_names_of_the_vision_model(i2v_folder, tmp_path, requests, backbone):
    folder = shutil.copytree(i2v_folder, tmp_path / "model")
    path = folder / "image_encoder" / "model.safetensors"
    save_file({f"vision_model.{name}": tensor for name, tensor in load_file(path).items()}, path)
    [cond] = open_backbone(folder, dtype=torch.float64).encode(requests[:1])
    [expected] = backbone.encode(requests[:1])
    assert torch.equal(cond.image, expected.image)


def test_requests_must_fit_the_task(backbone, tiny_folder, requests):
    backbone.check_requests(requests)
    open_backbone(tiny_folder).check_requests([NEGATIVE])
    with pytest.raises(
        ValueError, match=r"animates images; give .* `image`, for the prompt 'the square'$"
    ):
        backbone.check_requests([*requests, Request("the square")])
    with pytest.raises(
        ValueError,
        match=r"is a text-to-video model; remove the image from the prompt 'a red circle",
    ):
        open_backbone(tiny_folder).check_requests(requests)


def test_an_image_for_text_to_video_names_the_version_that_animates_it(
    i2v_folder, tencent_folder, tencent_i2v_folder, requests, tmp_path
):
    # as assets/tiny: one transformer for both tasks
    diffusers = shutil.copytree(i2v_folder, tmp_path / "diffusers")
    index = diffusers / "model_index.json"
    index.write_text(index.read_text().replace("HunyuanVideo15ImageToVideo", "HunyuanVideo15"))
    # as after downloading both versions
    tencent = shutil.copytree(tencent_folder, tmp_path / "tencent")
    shutil.copytree(tencent_i2v_folder, tencent, dirs_exist_ok=True)

    for folder, version in ((diffusers, "i2v"), (tencent, "480p_i2v")):
        with pytest.raises(ValueError, match=f" --pretrained_transformer_version {version}$"):
            open_backbone(folder).check_requests(requests)
        open_backbone(folder, version=version).check_requests(requests)
    with pytest.raises(ValueError) as refusal:
        open_backbone(tencent_folder).check_requests(requests)
    assert "pretrained_transformer_version" not in str(refusal.value)


@pytest.mark.parametrize("part", ["image_encoder", "feature_extractor"])
def test_missing_parts_are_named(i2v_folder, tmp_path, part):
    folder = shutil.copytree(i2v_folder, tmp_path / "model")
    shutil.rmtree(folder / part)
    with pytest.raises(FileNotFoundError, match=f"lacks {part}/"):
        open_backbone(folder)


def test_the_image_embedder_is_trained(backbone, tiny_folder):
    assert "image_embedder" not in backbone.transformer.never_trained
    assert "image_embedder" in open_backbone(tiny_folder).transformer.never_trained


@pytest.mark.parametrize(
    "version, shift, guidance, rollout_size",
    [
        ("480p_i2v", 5, 6, (81, 352, 624)),
        ("720p_i2v", 7, 6, (81, 720, 1280)),
        ("480p_i2v_distilled", 5, 1, (81, 352, 624)),
        ("720p_i2v_distilled", 7, 1, (81, 720, 1280)),
    ],
)
def test_published_versions(tmp_path, version, shift, guidance, rollout_size):
    absent = open_backbone(tmp_path / "absent", version=version, complete=False)
    assert isinstance(absent, ImageToVideo)
    assert (absent.sampling.shift, absent.sampling.guidance) == (shift, guidance)
    assert absent.rollout_size == rollout_size
    assert absent.architecture().sequence(1000, 150) == 1000 + 150 + 729
