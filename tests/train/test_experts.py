"""Training Wan 2.2 A14B: windows on either side of the boundary and across it, layouts, resuming, export.

Kinds: `a14b`, text to video, and `animating`, image to video. With shift 5, four denoising steps have the noise levels
1, 0.94, 0.83 and 0.63, and two have 1 and 0.83: as many on each side of the boundary.
"""

import functools
import re
import shutil

import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file

from sage_grpo.config.fields import ConfigError
from sage_grpo.config.parse import from_values
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.lora import LORA_FILES
from sage_grpo.models.registry import open_backbone
from sage_grpo.models.sample import integrate
from sage_grpo.models.wan.a14b import A14b
from sage_grpo.tools import publish
from sage_grpo.tools.doctor.update import check_update
from sage_grpo.tools.plan.planner import plan_of
from scripts import export_checkpoint
from tests.dist import run_ranks
from tests.models.wan.test_a14b import without_ftfy  # noqa: F401
from tests.smallest_run import PROMPTS, slow
from tests.train import test_layouts, test_resume
from tests.train.iterations import next_gradients
from tests.train.test_wan import gradients

SIZE = {"num_frames": 5, "height": 32, "width": 48}
HIGH, LOW = "transformer.", "transformer_2."
GUIDED = {"guidance_scale": 4.0, "guidance_scale_2": 3.0}
LORA = {"use_lora": True, **GUIDED}


@pytest.fixture
def kind():
    return "a14b"


@pytest.fixture
def flags(flags, kind, request, pictures, tmp_path):
    own = {
        "pretrained_model_root": str(request.getfixturevalue(f"{kind}_folder")),
        "validation_fixed_size": "32x48",
        "num_sampling_steps": 4,
        "timestep_shift": 5.0,
    }
    if kind == "animating":
        copies = [shutil.copy(path, tmp_path) for path in pictures]
        rows = [f"{text},{path}" for text, path in zip(PROMPTS, copies, strict=True)]
        file = tmp_path / "images.csv"
        file.write_text("\n".join(["prompt,image", *rows, ""]))
        own |= {"train_prompts": str(file), "validation_prompts": str(file)}
    return flags | SIZE | own


def sides(found):
    """Which transformers have a gradient that is not 0."""
    return {name.partition(".")[0] + "." for name, value in found.items() if value.any()}


@pytest.mark.parametrize("kind", ["a14b", slow("animating")])
@pytest.mark.parametrize(
    "changes",
    [
        slow({}),
        slow(LORA),
        {**LORA, "prompts_per_forward": 2},
        slow({"use_lora": True, "algorithm": "awm"}),
        {**LORA, "algorithm": "nft", "nft_beta": 0.5},
    ],
)
def test_the_first_ratio_is_exactly_one_also_across_the_boundary(make, changes, monkeypatch):
    """Slow: image to video, all weights, prompts apart, awm."""
    across = []
    by_noise_level = A14b.by_noise_level

    def counted(self, x, sigma, velocity_of):
        across.append(torch.is_grad_enabled() and len(set((sigma >= self.boundary).tolist())) > 1)
        return by_noise_level(self, x, sigma, velocity_of)

    monkeypatch.setattr(A14b, "by_noise_level", counted)
    found, record, advantages = next_gradients(make(**changes))
    assert record["policy/ratio_max_deviation"] == 0.0 and advantages.abs().max() > 0.5
    assert any(across) and sides(found) == {HIGH, LOW}


@pytest.mark.parametrize(
    "start, trained",
    [slow(0, {HIGH}), (1, {HIGH, LOW}), slow(2, {LOW})],
    ids=["high", "across", "low"],
)
def test_a_window_trains_the_transformers_of_its_steps(make, start, trained):
    """The first three iterations of a window that slides by one step; without a step, gradients are None.

    Slow: windows on one side of the boundary.
    """
    trainer = make(**LORA, sde_window="slide_iteration:2:1", learning_rate=0.01)
    trainer.state.step = start
    before = {name: value.clone() for name, value in trainer.optimization.parameters.items()}
    found, record, _ = next_gradients(trainer)
    assert record["policy/ratio_max_deviation"] == 0.0
    assert sides(found) == trained
    assert all(name.startswith(tuple(trained)) for name in found)

    trainer.optimization.step()
    for name, value in trainer.optimization.parameters.items():
        assert torch.equal(value, before[name]) != name.startswith(tuple(trained)), name


@pytest.mark.parametrize(
    "which, prefix, steps", [slow("high", HIGH, range(2)), ("low", LOW, range(2, 4))]
)
def test_an_adapter_for_one_transformer_trains_its_steps_alone(make, which, prefix, steps):
    """Slow: the other transformer."""
    trainer = make(**LORA, lora_experts=which)
    assert trainer.windows.steps == steps
    assert all(name.startswith(prefix) for name in trainer.optimization.parameters)
    found, record, _ = next_gradients(trainer)
    assert sides(found) == {prefix} and record["policy/ratio_max_deviation"] == 0.0
    plan = plan_of(trainer.config, 1)
    trained = sum(value.numel() for value in trainer.optimization.parameters.values())
    assert plan.windows.steps == steps and plan.trained.total == trained


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_transformers_that_take_turns_train_to_the_same_bits(make, monkeypatch, compiled):
    """As on a GPU: of each pair of blocks one is on the device; here both places are host memory.

    Slow: whole iterations in bf16; test_swap.py has single blocks.
    """
    # other backends need a C++ compiler
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    changes = {"dtype": "bf16", "enable_gradient_checkpointing": True, "compile": compiled}
    results = []
    for takes_turns in (False, True):
        monkeypatch.setattr(A14b, "takes_turns", lambda self, model, on=takes_turns: on)
        # as on a GPU, an adapter in fp32 beside weights in bf16
        trainer = make(**LORA, **changes, overwrite=True)
        dtypes = {p.dtype for p in trainer.backbone.transformer.parameters()}
        assert dtypes == {torch.bfloat16, torch.float32}
        swap = trainer.backbone.transformer.transformer.swap
        assert (swap is not None) == takes_turns
        found, record, _ = next_gradients(trainer)
        assert record["policy/ratio_max_deviation"] == 0.0
        results.append(found)
    assert swap.num_copies > 4
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


@pytest.fixture(scope="module")
def expected():
    return {}


ORDERED = {"enable_timestep_permutation": False}


@pytest.mark.parametrize(
    "kind, use_lora, name, changes",
    [
        slow("a14b", True, "dp2", {"sde_window": "random:2", "num_generations": 2}),
        slow("animating", True, "sp2", {}),
        slow("a14b", True, "fsdp2", {**ORDERED, "sde_window": "slide_iteration:1:1"}),
        slow("a14b", True, "fsdp2 x sp2", ORDERED),
        slow("a14b", True, "sp4", {}),
        slow("a14b", True, "hsdp 2 x 2", ORDERED),
        slow("a14b", False, "fsdp2", ORDERED),
        slow("animating", False, "fsdp2 x sp2", ORDERED),
    ],
)
def test_gradients_of_an_iteration_are_those_of_one_process(
    flags, expected, kind, use_lora, name, changes
):
    """Ranks may train different transformers at a time, unless the model is sharded.

    Slow: all layouts; test_layouts.py runs them with one transformer in `make test`.
    """
    found = {}
    key = (kind, use_lora, *map(str, changes.items()))
    for layout in ("one", name):
        if layout == "one" and key in expected:
            continue
        world, flags_of_layout = test_layouts.LAYOUTS[layout]
        kinds = {
            "sp_size": flags_of_layout.get("sp_size", 1),
            "sharded": flags_of_layout.get("enable_fsdp", False),
        }
        values = test_layouts.values_of(flags, use_lora, flags_of_layout) | SIZE
        # one step on each side of the boundary, and two where ranks draw theirs
        values |= {"num_sampling_steps": 4 if "sde_window" in changes else 2, **GUIDED, **changes}
        found[layout] = run_ranks(world, gradients, values, **kinds)
    wanted, kl, _ = expected.setdefault(key, found.get("one", [None])[0])
    assert kl > 0 and max(gradient.abs().max() for gradient in wanted.values()) > 1e-6
    for gradient, found_kl, _ in found[name]:
        assert found_kl == pytest.approx(kl, rel=1e-8)
        assert gradient.keys() == wanted.keys() and test_layouts.deviation(gradient, wanted) < 1e-8


@pytest.mark.parametrize(
    "kind, changes",
    [
        slow("a14b", {**LORA, "ema_decay": 0.9}),
        ("a14b", {**LORA, "algorithm": "nft", "nft_decay_growth": 0.2, "lora_experts": "low"}),
        slow("animating", {**LORA, "ema_decay": 0.9}),
        slow("a14b", {"ema_decay": 0.9}),
    ],
)
def test_a_resumed_run_is_the_straight_one(make, changes):
    """Also if only one transformer was trained until then. Slow: image to video, all weights."""
    changes |= {"max_steps": 2, "save_interval": 1, "update_ref_model_step": 1}
    if "lora_experts" not in changes:
        changes["sde_window"] = "slide_iteration:1:1"
    straight = test_resume.run(make, **changes)
    shutil.rmtree(straight.run.path / "checkpoints" / "step-000002")
    again = test_resume.run(make, resume_from_checkpoint="auto", **changes)
    tensors, numbers = test_resume.state(again)
    wanted, wanted_numbers = test_resume.state(straight)
    assert numbers == wanted_numbers and numbers["step"] == 2
    assert test_resume.same(tensors, wanted)


@pytest.mark.parametrize(
    "saved, loaded, use_lora",
    [
        slow("fsdp2", "one", True),
        slow("hsdp", "sp2", True),
        slow("one", "fsdp2", False),
    ],
)
def test_another_number_of_ranks_goes_on_from_the_same_state(flags, saved, loaded, use_lora):
    """Slow: adds the names of two transformers to what test_resume.py has in `make test`."""
    test_resume.test_another_number_of_ranks_goes_on_from_the_same_state(
        flags | ORDERED, saved, loaded, use_lora
    )


def trained(make, **changes):
    """The newest checkpoint of a short run, and its trainer."""
    trainer = make(
        num_sampling_steps=2, max_steps=1, learning_rate=0.05, save_interval=1, **changes
    )
    trainer.validation = None
    trainer.train()
    return trainer, trainer.run.path / "checkpoints" / "step-000001"


STOCK = {"a14b": WanPipeline, "animating": WanImageToVideoPipeline}


@pytest.mark.parametrize("kind", ["a14b", slow("animating")])
def test_both_adapters_give_the_same_clip_in_stock_diffusers(make, flags, kind):
    trainer, checkpoint = trained(make, **LORA)
    assert sorted(path.name for path in checkpoint.glob("*.safetensors")) == sorted(
        LORA_FILES.values()
    )
    folder = flags["pretrained_model_root"]
    ours = open_backbone(folder)
    request = trainer.requests[0]
    shape = ours.latent_shape(*SIZE.values())
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    call = {"prompt": request.text, "num_inference_steps": 4, "guidance_scale": 1.0, **SIZE}
    call |= {"latents": noise, "output_type": "pt"}
    if request.image:
        call["image"] = request.image.cropped()
    pipe = STOCK[kind].from_pretrained(folder)
    pipe.scheduler.register_to_config(shift=5.0)
    pipe.scheduler.set_shift(5.0)
    clips = [255 * pipe(**call).frames.movedim(2, 4)]
    pipe.load_lora_weights(checkpoint)
    clips.append(255 * pipe(**call).frames.movedim(2, 4))
    pipe.load_lora_weights(
        checkpoint, weight_name=LORA_FILES["transformer_2"], load_into_transformer_2=True
    )
    clips.append(255 * pipe(**call).frames.movedim(2, 4))

    for transformer in (pipe.transformer, pipe.transformer_2):
        bound = [name for name, _ in transformer.named_parameters() if "lora_" in name]
        assert len(bound) == 2 * 8 * len(transformer.blocks)
    assert len(trainer.optimization.parameters) == 2 * len(bound)

    ours.load_weights(checkpoint)
    [cond] = ours.encode([request])
    assert pipe.scheduler.sigmas[0] >= ours.boundary > pipe.scheduler.sigmas[3]
    with torch.no_grad():
        latents = integrate(ours, pipe.scheduler.sigmas, noise, cond, Guidance())
        clip = ours.decode(latents)
    assert (clip - clips[2]).abs().max() < 0.51
    assert (clip - clips[1]).abs().max() > 2 and (clip - clips[0]).abs().max() > 2


def exported(checkpoint, output, layout):
    words = ["--checkpoint", checkpoint, "--output", output, "--layout", layout]
    assert export_checkpoint.main([str(word) for word in words]) == 0
    return sorted(
        path.relative_to(output).as_posix()
        for path in output.rglob("*")
        if path.suffix == ".safetensors"
    )


def test_an_adapter_is_exported_as_two_files(make, flags, tmp_path):
    trainer, checkpoint = trained(make, **LORA)

    # as it is, with a card that loads both
    assert exported(checkpoint, tmp_path / "lora", "lora") == sorted(LORA_FILES.values())
    card = (tmp_path / "lora" / "README.md").read_text()
    loads = re.findall(r"pipe\.(\w+)\.load_lora_adapter\(\"FOLDER\", weight_name=\"(.+)\"\)", card)
    assert dict(loads) == LORA_FILES and card in (checkpoint / "README.md").read_text() + card

    # for ComfyUI, each with the layers of its own transformer
    files = exported(checkpoint, tmp_path / "comfy", "comfyui")
    assert files == ["comfy_high_noise.safetensors", "comfy_low_noise.safetensors"]
    for file, name in zip(files, LORA_FILES.values(), strict=True):
        tensors = load_file(tmp_path / "comfy" / file)
        stored = load_file(checkpoint / name)
        ours = tensors["diffusion_model.blocks.0.self_attn.q.lora_A.weight"]
        assert torch.equal(ours, stored["transformer.blocks.0.attn1.to_q.lora_A.weight"])
        assert len(tensors) == len(stored) == 2 * 8 * 2

    # merged, as two folders of stock transformers
    folders = exported(checkpoint, tmp_path / "merged", "diffusers")
    assert folders == [
        "transformer/diffusion_pytorch_model.safetensors",
        "transformer_2/diffusion_pytorch_model.safetensors",
    ]
    backbone = trainer.backbone
    x = torch.randn(1, *backbone.latent_shape(*SIZE.values()))
    [cond] = backbone.encode(trainer.requests[:1])
    for name, sigma in (("transformer", 0.95), ("transformer_2", 0.5)):
        stock = WanTransformer3DModel.from_pretrained(tmp_path / "merged", subfolder=name)
        with torch.no_grad():
            expected = stock(x, torch.tensor([1000 * sigma]), cond.text[None], return_dict=False)[0]
            velocity = backbone.velocity(x, sigma, cond, Guidance())
        torch.testing.assert_close(velocity, expected, rtol=1e-4, atol=1e-5)

    # for a hub, with a card that names both
    files = publish.collect(checkpoint, tmp_path, "mine")
    ours = ["mine_high_noise_comfyui.safetensors", "mine_low_noise_comfyui.safetensors"]
    assert [name for name in files if name.endswith(".safetensors")] == [
        *ours,
        *sorted(LORA_FILES.values()),
    ]
    card = files["README.md"].read_text()
    assert f"`{ours[0]}` and `{ours[1]}` of this repository" in card and "NAME" not in card

    refuses_tencent(checkpoint, tmp_path)


def refuses_tencent(checkpoint, folder):
    """Nothing is written, not even a draft."""
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError, match=r"is not of HunyuanVideo-1\.5"):
        export_checkpoint.export(checkpoint, folder / "tencent", "tencent")
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("which, file", [slow("high", "_high_noise"), ("low", "_low_noise")])
def test_one_adapter_is_exported_as_one_file(make, flags, tmp_path, which, file):
    trainer, checkpoint = trained(make, **LORA, lora_experts=which)
    assert len(list(checkpoint.glob("*.safetensors"))) == 1
    assert exported(checkpoint, tmp_path / "comfy", "comfyui") == [f"comfy{file}.safetensors"]
    assert len(exported(checkpoint, tmp_path / "merged", "diffusers")) == 1

    # with a card whose lines load the merged one
    card = (tmp_path / "merged" / "README.md").read_text()
    [lines] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    model = flags["pretrained_model_root"]
    names = {}
    exec(lines.replace("MODEL", model).replace("FOLDER", str(tmp_path / "merged")), names)
    base = WanPipeline.from_pretrained(model)
    for name, side in (("transformer", "high"), ("transformer_2", "low")):
        found = getattr(names["pipe"], name).blocks[0].attn1.to_q.weight
        same = torch.equal(found, getattr(base, name).blocks[0].attn1.to_q.weight)
        assert same == (side != which)

    # for a hub, named by its noise levels
    files = publish.collect(checkpoint, tmp_path, "mine")
    ours = f"mine{file}_comfyui.safetensors"
    assert [name for name in files if "comfyui" in name] == [ours]
    card = files["README.md"].read_text()
    assert f"`{ours}` of this repository" in card and f"the model of {which} noise levels" in card

    # it starts another run, whose adapters are of the same transformers
    checkpoint = shutil.copytree(checkpoint, tmp_path / "start")
    again = make(**LORA, lora_experts=which, init_from_checkpoint=str(checkpoint), overwrite=True)
    for name, value in trainer.optimization.parameters.items():
        assert torch.equal(again.optimization.parameters[name], value)
    with pytest.raises(ValueError, match="give the lora_experts that it was trained with"):
        make(**LORA, init_from_checkpoint=str(checkpoint), overwrite=True)


def test_all_weights_are_exported_as_two_folders(make, flags, tmp_path):
    trainer, checkpoint = trained(make)
    weights = dict(trainer.backbone.transformer.named_parameters())
    for name in ("transformer", "transformer_2"):
        stock = WanTransformer3DModel.from_pretrained(checkpoint, subfolder=name)
        for tensor, value in stock.named_parameters():
            assert torch.equal(value, weights[f"{name}.{tensor}"])
    ours = open_backbone(flags["pretrained_model_root"])
    ours.load_weights(checkpoint)
    loaded = dict(ours.transformer.named_parameters())
    assert all(torch.equal(value, weights[name]) for name, value in loaded.items())
    assert len(exported(checkpoint, tmp_path / "comfy", "comfyui")) == 2
    assert "writes `NAME/NAME_high_noise.safetensors` and" in (checkpoint / "README.md").read_text()
    refuses_tencent(checkpoint, tmp_path)


def test_the_doctor_knows_which_transformer_waits(make):
    trainer = make(**LORA, sde_window="slide_iteration:2:1")
    findings = {finding.check: finding for finding in check_update(trainer)}
    assert findings["gradients"].mark == "ok" and findings["ratio"].mark == "ok"
    [(reason, count)] = [
        (reason, count)
        for reason, count in findings["gradients"].numbers["waiting"].items()
        if "boundary" in reason
    ]
    assert reason.startswith("of transformer_2 wait") and count == 8 * 2


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"enable_fsdp": True, "sde_window": "random:2", "gather_for_rollout": True, **ORDERED}, "random_iteration"),
        ({"enable_fsdp": True}, "enable_timestep_permutation is True"),
        ({"enable_fsdp": True, "timestep_fraction": 0.5, **ORDERED}, "may never learn"),
        ({"cuda_graphs": True, "guidance_scale": 1.0}, "cuda_graphs is True"),
        ({"lora_experts": "high"}, "set use_lora True"),
    ],
)  # fmt: skip
def test_what_two_transformers_cannot_do_is_refused(make, changes, words):
    with pytest.raises(ConfigError, match=words):
        make(**changes)


def test_guidance_of_the_model_or_of_the_flags(flags):
    given = from_values(flags)
    plain = {name: value for name, value in flags.items() if name != "guidance_scale"}
    both = [
        plan_of(config, 1).config
        for config in (given, from_values(plain), from_values(plain | {"guidance_scale_2": 2.0}))
    ]
    scales = [(config.guidance_scale, config.guidance_scale_2) for config in both]
    assert scales == [(1.0, None), (4.0, 3.0), (4.0, 2.0)]
