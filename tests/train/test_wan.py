"""Training Wan 2.1: the gradients of an iteration, every layout, a resumed run, and the adapter in stock diffusers."""

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline

from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.registry import open_backbone
from sage_grpo.models.sample import integrate
from sage_grpo.models.wan.backbone import Wan
from sage_grpo.models.weights import open_folder
from tests.dist import run_ranks
from tests.smallest_run import slow
from tests.train import test_layouts, test_resume
from tests.train.iterations import in_fp64, next_gradients
from tests.train.test_update import our_gradients, prepared, reference_gradients, worst_difference  # noqa: F401

SIZE = {"num_frames": 5, "height": 32, "width": 48}


@pytest.fixture
def flags(flags, wan_folder):
    own = {
        "pretrained_model_root": str(wan_folder),
        "validation_fixed_size": "32x48",
        "timestep_shift": 5.0,
    }
    return flags | SIZE | own


def exact():
    """Norms and modulation in fp64 too, which the stock blocks compute in fp32; this process does nothing else."""
    in_fp64()
    torch.Tensor.float = torch.Tensor.double


def gradients(ranks, values):
    exact()
    return test_layouts.gradients(ranks, values)


@pytest.mark.parametrize(
    "changes", [{}, {"guidance_scale": 5.0, "use_lora": True, "micro_batch_size": 1}]
)
def test_the_first_ratio_is_exactly_one(make, changes):
    trainer = make(**changes)
    _, record, advantages = next_gradients(trainer)
    assert record["policy/ratio_max_deviation"] == 0.0 and advantages.abs().max() > 0.5


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


@pytest.fixture(scope="module")
def expected():
    return {}


@pytest.mark.parametrize(
    "use_lora, name",
    [
        slow(True, "sp2"),
        slow(True, "fsdp2"),
        slow(True, "fsdp2 x sp2"),
        slow(False, "sp2"),
        slow(False, "fsdp2 x sp2"),
    ],
)
def test_gradients_of_an_iteration_are_those_of_one_process(flags, expected, use_lora, name):
    """Slow: all layouts; test_layouts.py runs them with HunyuanVideo-1.5's classes in `make test`."""
    found = {}
    for layout in ("one", name):
        if layout == "one" and use_lora in expected:
            continue
        world, changes = test_layouts.LAYOUTS[layout]
        kinds = {"sp_size": changes.get("sp_size", 1), "sharded": changes.get("enable_fsdp", False)}
        values = test_layouts.values_of(flags, use_lora, changes) | SIZE
        found[layout] = run_ranks(world, gradients, values, **kinds)
    (wanted, kl, _) = expected.setdefault(use_lora, found.get("one", [None])[0])
    assert kl > 0 and max(gradient.abs().max() for gradient in wanted.values()) > 1e-6
    for gradient, found_kl, _ in found[name]:
        assert found_kl == pytest.approx(kl, rel=1e-8)
        assert gradient.keys() == wanted.keys() and test_layouts.deviation(gradient, wanted) < 1e-8


@pytest.mark.parametrize("use_lora", [True, slow(False)])
def test_a_resumed_run_is_the_straight_one(make, use_lora):
    """Slow: with all weights."""
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


def test_the_adapter_of_a_run_gives_the_same_clip_in_stock_diffusers(make, wan_folder):
    trainer = make(use_lora=True, max_steps=2, learning_rate=0.05, save_interval=2)
    trainer.validation = None
    trainer.train()
    checkpoint = trainer.run.path / "checkpoints" / "step-000002"
    pipe, ours, request = (
        WanPipeline.from_pretrained(wan_folder),
        open_backbone(wan_folder),
        Request("a red circle"),
    )
    noise, clips = (
        torch.randn(1, *ours.latent_shape(5, 32, 48), generator=torch.Generator().manual_seed(0)),
        [],
    )
    call = {
        "prompt": request.text,
        "height": 32,
        "width": 48,
        "num_frames": 5,
        "num_inference_steps": 3,
    }
    for lora in (None, checkpoint):
        if lora:
            pipe.load_lora_weights(lora, adapter_name="policy")
        clips.append(
            255
            * pipe(**call, guidance_scale=1.0, latents=noise, output_type="pt").frames.movedim(2, 4)
        )
    loaded = [name for name, _ in pipe.transformer.named_parameters() if "lora_" in name]
    assert (
        len(loaded) == len(trainer.optimization.parameters) == 2 * 8 * len(pipe.transformer.blocks)
    )
    ours.load_weights(checkpoint)
    with torch.no_grad():
        clip = ours.decode(
            integrate(ours, pipe.scheduler.sigmas, noise, *ours.encode([request]), Guidance())
        )
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
