"""Training Wan 2.1 and 2.2 TI2V: gradients of an iteration, layouts, a resumed run, the adapter in stock diffusers.

Kinds: `wan21`; `ti2v` animates images; `mixed` is the same folder with an image for every other prompt.
"""

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from torch.func import functional_call

from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.registry import open_backbone
from sage_grpo.models.sample import integrate
from sage_grpo.models.wan.backbone import Wan
from sage_grpo.models.weights import open_folder
from tests.dist import run_ranks
from tests.smallest_run import PROMPTS, slow
from tests.train import test_graphs, test_layouts, test_resume
from tests.train.iterations import in_fp64, next_gradients
from tests.train.test_update import our_gradients, prepared, reference_gradients, worst_difference  # noqa: F401

SIZES = {
    "wan21": {"num_frames": 5, "height": 32, "width": 48},
    # 9 tokens, of which the first of two ranks has 5: the 3 of the clean frame and 2 others
    "ti2v": {"num_frames": 9, "height": 32, "width": 96},
    "mixed": {"num_frames": 5, "height": 32, "width": 64},
}
IMAGES = {"ti2v": (0, 1, 2), "mixed": (0, None)}  # the picture of each prompt

on_both = pytest.mark.parametrize("kind", ["wan21", "ti2v"])


@pytest.fixture
def kind():
    return "wan21"


@pytest.fixture
def flags(flags, kind, wan_folder, ti2v_folder, pictures, tmp_path):
    size = SIZES[kind]
    own = {
        "pretrained_model_root": str(wan_folder if kind == "wan21" else ti2v_folder),
        "validation_fixed_size": "{height}x{width}".format(**size),
        "validate_video_length": size["num_frames"],
        "timestep_shift": 5.0,
    }
    if kind in IMAGES:
        copies = [shutil.copy(path, tmp_path) for path in pictures]
        rows = [
            f"{text},{'' if number is None else copies[number]}"
            for text, number in zip(PROMPTS, IMAGES[kind], strict=False)
        ]
        file = tmp_path / "images.csv"
        file.write_text("\n".join(["prompt,image", *rows, ""]))
        own |= {"train_prompts": str(file), "validation_prompts": str(file)}
    return flags | size | own


def exact():
    """Norms and modulation in fp64 too, which the stock blocks compute in fp32; this process does nothing else."""
    in_fp64()
    torch.Tensor.float = torch.Tensor.double


def gradients(ranks, values):
    exact()
    return test_layouts.gradients(ranks, values)


LORA = {"guidance_scale": 5.0, "use_lora": True, "micro_batch_size": 1}


@on_both
@pytest.mark.parametrize("changes", [slow({}), LORA])
def test_the_first_ratio_is_exactly_one(make, changes):
    """Slow: all weights."""
    trainer = make(**changes)
    _, record, advantages = next_gradients(trainer)
    assert record["policy/ratio_max_deviation"] == 0.0 and advantages.abs().max() > 0.5


@pytest.mark.parametrize("kind", ["mixed"])
@pytest.mark.parametrize(
    "changes",
    [
        {"guidance_scale": 3.0, "prompts_per_forward": 2},
        {"train_clips": 2, "num_generations": 4, "batch_size": 8, "use_lora": True},
        slow({"sde_window": "random:2", "same_init_noise": True, "tail_steps": 1}),
        slow({"algorithm": "awm"}),
        slow({"algorithm": "nft", "nft_beta": 0.5}),
    ],
)
def test_prompts_with_and_without_an_image_train_together(make, changes):
    """Their states have different shapes, so nothing may stack them; their clips do not.

    Slow: windows, awm and nft.
    """
    trainer = make(**changes)
    batch = trainer.roll_out()
    frames = {
        trajectory.data.latents.shape[2]: trainer.requests[
            trajectory.micro_batch[0].prompt_index
        ].image
        for trajectory in batch
    }
    assert sorted(frames) == [1, 2] and frames[1] is not None and frames[2] is None
    clips = trainer.decode(batch)
    assert {clip.shape for clip in clips} == {(5, 32, 64, 3)}

    found, record, advantages = next_gradients(trainer)
    assert record["policy/ratio_max_deviation"] == 0.0 and advantages.abs().max() > 0.5
    assert max(gradient.abs().max() for gradient in found.values()) > 1e-6
    assert trainer.validation.run(trainer.run.path / "validation")["count"] == 2


@pytest.fixture
def whole_velocity(ti2v_folder):
    """The velocity of a trainer's free frames by the stock transformer, which sees a timestep for each token."""
    stock = WanTransformer3DModel.from_pretrained(ti2v_folder, subfolder="transformer")

    def build(trainer, clean=0.0):
        parameters = dict(trainer.backbone.transformer.named_parameters())

        def velocity(x, sigma, cond, guidance):
            latents = torch.cat([cond.first.expand(len(x), -1, -1, -1, -1), x], dim=2)
            per_frame = latents.shape[3] * latents.shape[4] // 4
            timestep = 1000 * sigma[:, None].repeat(1, latents.shape[2] * per_frame)
            timestep[:, :per_frame] = clean
            text = cond.text.expand(len(x), -1, -1)
            args = {"hidden_states": latents, "timestep": timestep, "encoder_hidden_states": text}
            output = functional_call(stock, parameters, kwargs=args | {"return_dict": False})[0]
            return output[:, :, 1:]

        return velocity

    return build


@pytest.mark.parametrize("kind", ["ti2v"])
def test_the_clean_frame_is_in_no_loss_and_in_no_mean(prepared, whole_velocity):  # noqa: F811
    """The formulas on the stock transformer, whose means are over the frames after the first alone."""
    trainer, schedule, batch, rewards = prepared()
    velocity = whole_velocity(trainer)
    assert batch[0].data.x.shape[2:] == (4, 2, 2, 6)  # of three latent frames

    # the log-probability, by the number of elements
    first, second = batch[0].data.x[0, 0], batch[0].data.outcome[0, 0]
    mean = schedule.a[0] * first + schedule.b[0] * batch[0].data.velocity[0, 0]
    square = ((second - mean) / schedule.std[0]).square().sum() / (4 * 2 * 2 * 6)
    expected = schedule.log_norm[0] - square / 2
    torch.testing.assert_close(batch[0].data.log_prob[0, 0], expected.float(), rtol=1e-5, atol=1e-5)

    # the gradient of the loss
    reference = reference_gradients(trainer, batch, rewards, eta=0.5, velocity=velocity)
    found = our_gradients(trainer, schedule, batch, rewards)
    assert worst_difference(found, reference) < 2e-3

    # the comparison sees a frame that is not clean
    mistaken = whole_velocity(trainer, clean=500.0)
    reference = reference_gradients(trainer, batch, rewards, eta=0.5, velocity=mistaken)
    assert worst_difference(found, reference) > 0.01


def test_gradients_equal_the_formulas(prepared):  # noqa: F811
    trainer, schedule, batch, rewards = prepared()
    reference = reference_gradients(trainer, batch, rewards, eta=0.5)
    assert isinstance(trainer.backbone, Wan)
    assert (
        worst_difference(our_gradients(trainer, schedule, batch, rewards), reference) < 2e-3
    )  # fp32


def test_the_comparison_sees_a_mistake(prepared):  # noqa: F811
    trainer, schedule, batch, rewards = prepared()
    reference = reference_gradients(trainer, batch, rewards, eta=0.5, error="sign of the KL")
    assert worst_difference(our_gradients(trainer, schedule, batch, rewards), reference) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixed"])
def test_graphs_tell_clips_with_an_image_apart(make, monkeypatch):
    """Slow: test_graphs.py has the promise on the trivial model."""
    test_graphs.test_a_run_is_the_same_to_the_bit(make, monkeypatch, {"use_lora": True})


@pytest.fixture(scope="module")
def expected():
    return {}


@pytest.mark.parametrize(
    "kind, use_lora, name",
    [
        slow("wan21", True, "fsdp2 x sp2"),
        slow("wan21", False, "sp2"),
        slow("ti2v", True, "dp2"),
        slow("ti2v", False, "fsdp2 x sp2"),
    ],
)
def test_gradients_of_an_iteration_are_those_of_one_process(flags, expected, kind, use_lora, name):
    """Slow: all layouts; test_layouts.py runs them with HunyuanVideo-1.5's classes in `make test`."""
    found = {}
    for layout in ("one", name):
        if layout == "one" and (kind, use_lora) in expected:
            continue
        world, changes = test_layouts.LAYOUTS[layout]
        kinds = {"sp_size": changes.get("sp_size", 1), "sharded": changes.get("enable_fsdp", False)}
        values = test_layouts.values_of(flags, use_lora, changes) | SIZES[kind]
        found[layout] = run_ranks(world, gradients, values, **kinds)
    (wanted, kl, _) = expected.setdefault((kind, use_lora), found.get("one", [None])[0])
    assert kl > 0 and max(gradient.abs().max() for gradient in wanted.values()) > 1e-6
    for gradient, found_kl, _ in found[name]:
        assert found_kl == pytest.approx(kl, rel=1e-8)
        assert gradient.keys() == wanted.keys() and test_layouts.deviation(gradient, wanted) < 1e-8


@pytest.mark.parametrize(
    "kind, use_lora", [("wan21", True), slow("wan21", False), slow("mixed", True)]
)
def test_a_resumed_run_is_the_straight_one(make, use_lora):
    """Slow: with all weights, and with images for some prompts."""
    changes = {
        "use_lora": use_lora,
        "max_steps": 4,
        "save_interval": 2,
        "update_ref_model_step": 3,
        "ema_decay": 0.9,
    }
    straight = test_resume.run(make, **changes)
    shutil.rmtree(straight.run.path / "checkpoints" / "step-000004")
    again = test_resume.run(make, resume_from_checkpoint="auto", **changes)
    (tensors, numbers), (wanted, wanted_numbers) = (
        test_resume.state(again),
        test_resume.state(straight),
    )
    assert numbers == wanted_numbers and numbers["step"] == 4
    assert test_resume.same(tensors, wanted)


@pytest.mark.slow
def test_ranks_go_on_as_if_never_stopped(flags):
    """Sharded all weights, among them tables whose single row only one rank has."""
    values = flags | {"enable_fsdp": True, "max_steps": 4, "save_interval": 2, "num_generations": 4}
    wanted = run_ranks(2, test_resume.straight, values, sharded=True)
    shutil.rmtree(Path(flags["output_dir"]) / "checkpoints" / "step-000004")
    for found, state in zip(
        run_ranks(2, test_resume.resumed, values, sharded=True), wanted, strict=True
    ):
        assert test_resume.same(found, state)


@pytest.mark.parametrize("kind", ["wan21", slow("ti2v")])
def test_the_adapter_of_a_run_gives_the_same_clip_in_stock_diffusers(
    make, flags, kind, stock_image_to_video
):
    """Slow: Wan 2.2 TI2V."""
    trainer = make(use_lora=True, max_steps=2, learning_rate=0.05, save_interval=2)
    trainer.validation = None
    trainer.train()
    checkpoint = trainer.run.path / "checkpoints" / "step-000002"

    folder = flags["pretrained_model_root"]
    ours = open_backbone(folder)
    request = trainer.requests[0]
    size = SIZES[kind]
    shape = ours.latent_shape(*size.values())
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    call = {"prompt": request.text, "num_inference_steps": 3, "guidance_scale": 1.0, **size}
    call |= {"latents": noise, "output_type": "pt"}
    stock = WanPipeline
    if request.image:
        stock = stock_image_to_video
        call["image"] = request.image.cropped()
    pipe = stock.from_pretrained(folder)
    clips = []
    for lora in (None, checkpoint):
        if lora:
            pipe.load_lora_weights(lora, adapter_name="policy")
        clips.append(255 * pipe(**call).frames.movedim(2, 4))

    loaded = [name for name, _ in pipe.transformer.named_parameters() if "lora_" in name]
    trained = len(trainer.optimization.parameters)
    assert len(loaded) == trained == 2 * 8 * len(pipe.transformer.blocks)
    ours.load_weights(checkpoint)
    [cond] = ours.encode([request])
    _, frames, *_ = ours.free_shape(shape, cond)
    with torch.no_grad():
        free = integrate(ours, pipe.scheduler.sigmas, noise[:, :, -frames:], cond, Guidance())
        clip = ours.decode(ours.full_latents(free, cond))
    assert (clip - clips[1]).abs().max() < 0.51 and (clip - clips[0]).abs().max() > 2


def test_all_weights_of_a_run_load_in_stock_diffusers(make, wan_folder):
    trainer = make(max_steps=1, learning_rate=0.01, save_interval=1)
    trainer.validation = None
    trainer.train()
    folder = trainer.run.path / "checkpoints" / "step-000001" / "transformer"
    model = type(WanPipeline.from_pretrained(wan_folder).transformer).from_pretrained(folder)
    own = dict(trainer.backbone.transformer.named_parameters())
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in own.items()}
    base = open_folder(wan_folder / "transformer")
    moved = [not torch.equal(p.detach(), base.read(name)) for name, p in model.named_parameters()]
    assert all(moved) and all(torch.equal(p, own[name]) for name, p in model.named_parameters())


def test_guidance_has_the_models_negative_prompt_unless_told_otherwise(make, monkeypatch):
    asked = []
    encode = Wan.encode
    monkeypatch.setattr(
        Wan, "encode", lambda self, requests: asked.extend(requests) or encode(self, requests)
    )
    trainer = make(guidance_scale=5.0)
    assert asked[0] == Request(Wan.negative_prompt) and trainer.config.negative_prompt.startswith(
        "色调艳丽"
    )
    asked.clear()
    make(guidance_scale=5.0, negative_prompt="", overwrite=True)
    assert asked[0] == Request("")
