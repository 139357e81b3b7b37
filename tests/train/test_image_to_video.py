"""Training image to video: the gradients of an iteration, layouts, a resumed run, rewards that see the image."""

import shutil

import numpy as np
import pytest
import torch
from diffusers import HunyuanVideo15ImageToVideoPipeline
from PIL import Image

from sage_grpo.config.parse import from_values
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.hunyuan15.image import ImageToVideo
from sage_grpo.models.registry import open_backbone
from sage_grpo.models.sample import integrate
from sage_grpo.runs.clips import read_clips
from sage_grpo.train.inputs import validation_requests
from tests.smallest_run import PROMPTS, slow
from tests.train import test_layouts, test_resume
from tests.train.iterations import next_gradients
from tests.train.test_update import our_gradients, prepared, reference_gradients, worst_difference  # noqa: F401


@pytest.fixture
def flags(flags, i2v_folder, pictures, tmp_path):
    copies = [shutil.copy(path, tmp_path) for path in pictures]
    rows = [f"{text},{path}" for text, path in zip(PROMPTS, copies, strict=True)]
    (tmp_path / "images.csv").write_text("\n".join(["prompt,image", *rows, ""]))
    file = str(tmp_path / "images.csv")
    own = {"train_prompts": file, "validation_prompts": file, "validation_fixed_size": "16x24"}
    return flags | own | {"pretrained_model_root": str(i2v_folder)}


LORA = {"guidance_scale": 5.0, "use_lora": True, "micro_batch_size": 1}


@pytest.mark.parametrize(
    "changes", [slow({}), slow(LORA), {"prompts_per_forward": 2, "guidance_scale": 3.0}]
)
def test_the_first_ratio_is_exactly_one(make, changes):
    """Slow: prompts apart."""
    trainer = make(**changes)
    found, record, advantages = next_gradients(trainer)
    assert record["policy/ratio_max_deviation"] == 0.0 and advantages.abs().max() > 0.5
    if not trainer.config.use_lora:
        assert (
            min(found[name].abs().max() for name in found if name.startswith("image_embedder.")) > 0
        )


def test_each_group_has_its_own_image(make):
    """The clips of a group share one, and no group has that of another."""
    trainer = make()
    batch = trainer.roll_out()
    assert len(batch) == 2 and not torch.equal(batch[0].cond.first, batch[1].cond.first)
    for one in batch:
        (expected,) = trainer.backbone.encode([trainer.requests[one.micro_batch[0][0]]])
        assert len({prompt for prompt, _ in one.micro_batch}) == 1 and torch.equal(
            one.cond.first, expected.first
        )
    assert {r.image.size for r in trainer.requests} == {(16, 16)}
    assert {r.image.size for r in trainer.validation.requests} == {(16, 24)}


def test_gradients_equal_the_formulas(prepared):  # noqa: F811
    trainer, schedule, batch, rewards = prepared()
    reference = reference_gradients(trainer, batch, rewards, eta=0.5)
    assert (
        isinstance(trainer.backbone, ImageToVideo) and "image_embedder.linear_1.weight" in reference
    )
    assert (
        worst_difference(our_gradients(trainer, schedule, batch, rewards), reference) < 2e-3
    )  # fp32


@pytest.fixture(scope="module")
def expected():
    return {}


@pytest.mark.parametrize(
    "use_lora, name",
    [
        slow(True, "dp2"),
        slow(False, "hsdp 2 x 2"),
        slow(False, "fsdp2 x sp2"),
    ],
)
def test_gradients_of_an_iteration_are_those_of_one_process(flags, expected, use_lora, name):
    """Slow: all layouts; test_layouts.py runs them without images in `make test`."""
    if use_lora not in expected:
        expected[use_lora] = test_layouts.run(flags, use_lora, "one")[0]
    wanted, kl, _ = expected[use_lora]
    assert kl > 0 and max(gradient.abs().max() for gradient in wanted.values()) > 1e-6
    for gradient, found_kl, _ in test_layouts.run(flags, use_lora, name):
        assert found_kl == pytest.approx(kl, rel=1e-8)
        assert gradient.keys() == wanted.keys() and test_layouts.deviation(gradient, wanted) < 1e-8


@pytest.mark.parametrize("use_lora", [True, slow(False)])
def test_a_resumed_run_is_the_straight_one(make, use_lora):
    """Slow: with all weights."""
    changes = {"use_lora": use_lora, "max_steps": 4, "save_interval": 2, "update_ref_model_step": 3}
    straight = test_resume.run(make, **changes)
    shutil.rmtree(straight.run.path / "checkpoints" / "step-000004")
    again = test_resume.run(make, resume_from_checkpoint="auto", **changes)
    (tensors, numbers), (wanted, wanted_numbers) = (
        test_resume.state(again),
        test_resume.state(straight),
    )
    assert numbers == wanted_numbers and numbers["step"] == 4
    assert test_resume.same(tensors, wanted)


def test_other_images_are_other_prompts(make, flags, pictures, tmp_path):
    before = make().fingerprints
    picture = shutil.copy(pictures[0], tmp_path)
    rows = [f"{text},{picture}" for text in PROMPTS]
    (tmp_path / "others.csv").write_text("\n".join(["prompt,image", *rows, ""]))
    after = make(train_prompts=str(tmp_path / "others.csv"), overwrite=True).fingerprints
    assert [name for name in before if before[name] != after[name]] == ["training prompts"]


def test_a_complete_run_with_rewards_that_see_the_image(make):
    """Two iterations and a validation: frame 0 is compared with the clip's own image, motion is held out."""
    trainer = make(reward_model=("shapes", "first_frame"), holdout_reward="motion", validation_interval=2,
                   reward_weights={"shapes": {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}, "first_frame": 2.0})  # fmt: skip
    trainer.train()
    (record,) = trainer.run.path.glob("validation/*/clips.json")
    text = record.read_text()
    assert text.count('"first_frame.first_frame"') == 3 and text.count('"motion"') == 3
    images = [clip.image for clip in read_clips(record.parent)]
    assert images == [str(request.image.path) for request in trainer.validation.requests]
    batch = trainer.roll_out()
    clips = trainer.decode(batch)
    scores = trainer.score(batch, clips).named["first_frame.first_frame"]
    for clip, request, score in zip(clips, trainer.requests_of(batch), scores, strict=True):
        image = torch.from_numpy(np.array(request.image.cropped())).double()
        assert score.item() == pytest.approx(
            1 - ((clip[0] - image) / 255).square().mean().sqrt().item(), abs=1e-12
        )
    assert len(set(scores.tolist())) == 4


@pytest.mark.parametrize("changes, message", [
    ({"train_prompts": "plain"}, r"animates images; .* for the prompt 'a red circle moving left'$"),
    ({"validation_prompts": "plain"}, r"animates images; .* for the prompt 'a red circle moving left'$"),
    ({"pretrained_model_root": "t2v"}, r"is a text-to-video model; remove the image from the prompt 'a red circle"),
    ({"train_prompts": "broken"}, r"broken.csv line 2: the image \S+ cannot be read"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_before_the_run_folder_appears(
    make, tiny_folder, tmp_path, changes, message
):
    (tmp_path / "plain.txt").write_text("\n".join(PROMPTS))
    (tmp_path / "bad.png").write_text("no image")
    (tmp_path / "broken.csv").write_text("prompt,image\na,bad.png\n")
    files = {"plain": "plain.txt", "broken": "broken.csv"}
    values = {
        name: str(tmp_path / files[v]) if v in files else str(tiny_folder)
        for name, v in changes.items()
    }
    with pytest.raises(ValueError, match=message):
        make(**values)
    assert not (tmp_path / "run").exists()


def test_rewards_refuse_requests_without_an_image(flags, tiny_folder, tmp_path, make):
    (tmp_path / "plain.txt").write_text("\n".join(PROMPTS))
    plain = dict.fromkeys(("train_prompts", "validation_prompts"), str(tmp_path / "plain.txt"))
    with pytest.raises(
        ValueError, match="the reward first_frame needs an image, and the prompt 'a red circle"
    ):
        make(pretrained_model_root=str(tiny_folder), reward_model="first_frame", **plain)


@pytest.mark.slow
def test_the_adapter_of_a_run_gives_the_same_clip_in_stock_diffusers(make, i2v_folder, pictures):
    """Adds image to video to the test of the same name for Wan."""
    trainer = make(use_lora=True, max_steps=2, learning_rate=0.05, save_interval=2)
    trainer.validation = None
    trainer.train()
    checkpoint, clips = trainer.run.path / "checkpoints" / "step-000002", []
    card = (checkpoint / "README.md").read_text()
    assert "pipeline_tag: image-to-video" in card and "--image FILE --prompt" in card
    pipe = HunyuanVideo15ImageToVideoPipeline.from_pretrained(i2v_folder)
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.guider.guidance_scale = 24, 24, 1.0
    ours, request = open_backbone(i2v_folder), trainer.requests[0]
    request = request.sized(*ours.default_size(request))
    noise = torch.randn(
        1, *ours.latent_shape(5, *request.image.size), generator=torch.Generator().manual_seed(0)
    )
    call = {
        "prompt": request.text,
        "num_frames": 5,
        "num_inference_steps": 3,
        "latents": noise,
        "output_type": "pt",
    }
    for lora in (None, checkpoint):
        if lora:
            pipe.transformer.load_lora_adapter(lora, use_safetensors=True, adapter_name="policy")
        clips.append(255 * pipe(Image.open(pictures[0]), **call).frames.movedim(2, 4))
    ours.load_weights(checkpoint)
    with torch.no_grad():
        clip = ours.decode(
            integrate(ours, pipe.scheduler.sigmas, noise, *ours.encode([request]), Guidance())
        )
    assert (clip - clips[1]).abs().max() < 0.6 and (clip - clips[0]).abs().max() > 2


def test_held_out_requests_have_the_size_of_the_validation(flags):
    config = from_values(flags | {"num_validation_prompts": 2})
    assert [request.image.size for request in validation_requests(config)] == [(16, 24)] * 2
