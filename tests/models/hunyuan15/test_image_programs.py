"""An image-to-video folder through the programs, which need no flag of its own."""

import json
import shutil

import pytest

import generate
import post_train
from sage_grpo.tools import evaluate
from sage_grpo.tools.doctor import __main__ as doctor
from sage_grpo.tools.plan import __main__ as plan
from tests.models.wan.test_programs import SMALL, flag_list


@pytest.fixture
def words(i2v_folder, pictures, tmp_path):
    """Flags that every program takes."""
    prompts = tmp_path / "prompts.csv"
    # the images alone tell the requests apart
    copies = [shutil.copy(path, tmp_path) for path in pictures[:2]]
    rows = [f"a red circle moving left,{path}" for path in copies]
    prompts.write_text("\n".join(["prompt,image", *rows, ""]))
    flags = {
        "pretrained_model_root": i2v_folder,
        "output_dir": tmp_path / "run",
        "train_prompts": prompts,
        "validation_prompts": prompts,
        **SMALL,
        "reward_model": "first_frame",
        "guidance_scale": 2.0,
    }
    return flag_list(flags)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_every_program_takes_the_folder(words, i2v_folder, pictures, tmp_path, capsys):
    """Slow: whole programs; test_image.py compares their parts with stock."""
    # training
    assert post_train.main(words) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"

    # evaluation
    output = tmp_path / "evaluation"
    flags = {"checkpoints": checkpoint, "output": output}
    assert evaluate.main([*words, *flag_list(flags)]) == 0
    clips = json.loads((output / "base" / "clips.json").read_text())
    assert [clip["image"] for clip in clips] == [str(tmp_path / path.name) for path in pictures[:2]]
    assert len({clip["scores"]["first_frame"] for clip in clips}) == 2

    # planner
    capsys.readouterr()
    assert plan.main(words) == 0
    assert "tokens, 150 of them text and 9 of an image" in capsys.readouterr().out

    # doctor
    doctor.main([*words, "--overwrite", "--output", str(tmp_path / "doctor")])
    findings = json.loads((tmp_path / "doctor" / "doctor.json").read_text())["findings"]
    wrong = [finding["check"] for finding in findings if finding["mark"] == "WRONG"]
    assert wrong == ["vae"]  # it is untrained
    passed = {finding["check"] for finding in findings if finding["mark"] == "ok"}
    assert passed >= {"ratio", "gradients", "noise 0", "prompts"}
    assert not any("repeat another" in finding["text"] for finding in findings)

    # generation
    flags = {
        "model_path": i2v_folder,
        "prompt": "a red circle",
        "image": pictures[0],
        "num_inference_steps": 2,
        "device": "cpu",
        "checkpoint_path": checkpoint,
        "output_path": tmp_path / "clips",
    }
    generate.main(flag_list(flags))
    assert len(list((tmp_path / "clips").glob("*.mp4"))) == 1
