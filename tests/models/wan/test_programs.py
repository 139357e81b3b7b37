"""A Wan folder through the programs: training, evaluation, plan, export and sampling need no flag of its own."""

import json
import shutil

import pytest
import torch
from diffusers import WanTransformer3DModel

import generate
import post_train
from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.registry import open_backbone
from sage_grpo.models.wan.backbone import Wan
from sage_grpo.tools import evaluate
from sage_grpo.tools.doctor import __main__ as doctor
from sage_grpo.tools.plan import __main__ as plan
from scripts import export_checkpoint
from tests.programs import flag_list

SMALL = {
    "reward_model": "shapes", "batch_size": 2, "num_generations": 2, "num_sampling_steps": 3, "num_frames": 5,
    "validation_num_inference_steps": 2, "use_lora": True, "lora_r": 4, "max_steps": 2, "save_interval": 2,
    "learning_rate": 0.05, "report_to": "none", "device": "cpu", "validation_interval": 0, "dtype": "fp32",
}  # fmt: skip


@pytest.fixture
def kind():
    return "wan"


@pytest.fixture
def folder(kind, request):
    return request.getfixturevalue(f"{kind}_folder")


@pytest.fixture
def words(folder, kind, pictures, tmp_path):
    """Flags that every program takes; the first prompt of TI2V has an image, and both of image to video do."""
    with_image = {"ti2v": 1, "animating": 2}.get(kind, 0)
    copies = [shutil.copy(picture, tmp_path) for picture in pictures[:with_image]]
    first, second, *_ = [*copies, "", ""]
    prompts = tmp_path / "prompts.csv"
    rows = ["prompt,image", f"a red circle moving left,{first}"]
    rows.append(f"a green square moving right,{second}")
    prompts.write_text("\n".join([*rows, ""]))
    flags = {
        "pretrained_model_root": folder,
        "output_dir": tmp_path / "run",
        "train_prompts": prompts,
        "validation_prompts": prompts,
        **SMALL,
    }
    return flag_list(flags)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("kind, tokens", [("ti2v", 2), ("a14b", 8), ("animating", 8)])
def test_every_program_takes_the_folder(words, folder, kind, tokens, pictures, tmp_path, capsys):
    """Slow: whole programs; the tests of the backbone compare their parts with stock."""
    # training
    assert post_train.main(words) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"

    # evaluation
    output = tmp_path / "evaluation"
    flags = {"checkpoints": checkpoint, "output": output}
    assert evaluate.main([*words, *flag_list(flags)]) == 0
    settings = json.loads((output / "settings.json").read_text())
    assert settings["negative_prompt"] == Wan.negative_prompt

    # planner
    capsys.readouterr()
    assert plan.main(words) == 0
    size = f"5 frames of 32 x 32: {tokens} tokens, 0 of them text"
    assert size in capsys.readouterr().out

    # doctor
    doctor.main([*words, "--overwrite", "--output", str(tmp_path / "doctor"), "--skip_ab"])
    findings = json.loads((tmp_path / "doctor" / "doctor.json").read_text())["findings"]
    wrong = [finding["check"] for finding in findings if finding["mark"] == "WRONG"]
    assert wrong == ["vae"]  # it is untrained
    passed = {finding["check"] for finding in findings if finding["mark"] == "ok"}
    assert passed >= {"ratio", "gradients", "noise 0", "prompts"}

    # generation
    flags = {
        "model_path": folder,
        "prompt": "a red circle",
        "num_inference_steps": 2,
        "device": "cpu",
    }
    if kind in ("ti2v", "animating"):
        flags |= {"image": pictures[0], "fixed_size": "32x64"}
    for name, weights in (("base", {}), ("trained", {"checkpoint_path": checkpoint})):
        generate.main(flag_list({**flags, **weights, "output_path": tmp_path / name}))
        assert len(list((tmp_path / name).glob("*.mp4"))) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_an_exported_adapter_is_merged_into_a_stock_transformer(words, wan_folder, tmp_path):
    """Slow: trains and exports; test_lora.py loads adapters in stock classes."""
    assert post_train.main(words) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    output = tmp_path / "exported"
    assert export_checkpoint.main(flag_list({"checkpoint": checkpoint, "output": output})) == 0

    stock = WanTransformer3DModel.from_pretrained(output)
    base = open_backbone(wan_folder)
    trained = open_backbone(wan_folder)
    trained.load_weights(checkpoint)
    x = torch.randn(1, *base.latent_shape(5, 32, 32))
    [cond] = base.encode([Request("a red circle")])
    with torch.no_grad():
        expected = stock(x, torch.tensor([500.0]), cond.text[None], return_dict=False)[0]
        velocity = trained.velocity(x, 0.5, cond, Guidance())
        base_velocity = base.velocity(x, 0.5, cond, Guidance())
    torch.testing.assert_close(velocity, expected, rtol=1e-4, atol=1e-5)
    assert (base_velocity - expected).abs().max() > 1e-3
