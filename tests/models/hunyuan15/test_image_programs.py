"""An image-to-video folder through the programs, which need no flag of its own."""

import json

import pytest

import generate
import post_train
from sage_grpo.tools import evaluate
from sage_grpo.tools.doctor import __main__ as doctor
from sage_grpo.tools.plan import __main__ as plan
from tests.models.wan21.test_programs import SMALL


@pytest.fixture
def words(i2v_folder, pictures, tmp_path):
    prompts = tmp_path / "prompts.csv"
    rows = [
        f"a red circle moving left,{path}" for path in pictures[:2]
    ]  # the images alone tell them apart
    prompts.write_text("\n".join(["prompt,image", *rows, ""]))
    flags = {
        "pretrained_model_root": i2v_folder,
        "output_dir": tmp_path / "run",
        "train_prompts": prompts,
    }
    flags |= (
        {"validation_prompts": prompts}
        | SMALL
        | {"reward_model": "first_frame", "guidance_scale": 2.0}
    )
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def test_every_program_takes_the_folder(words, i2v_folder, pictures, tmp_path, capsys):
    assert post_train.main(words) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    assert (
        evaluate.main(
            [*words, "--checkpoints", str(checkpoint), "--output", str(tmp_path / "evaluation")]
        )
        == 0
    )
    result = json.loads((tmp_path / "evaluation" / "base" / "clips.json").read_text())
    assert [clip["image"] for clip in result] == [str(path) for path in pictures[:2]]
    assert len({clip["scores"]["first_frame"] for clip in result}) == 2
    capsys.readouterr()
    assert plan.main(words) == 0
    assert "tokens, 150 of them text and 9 of an image" in capsys.readouterr().out
    doctor.main([*words, "--overwrite", "--output", str(tmp_path / "doctor")])
    findings = json.loads((tmp_path / "doctor" / "doctor.json").read_text())["findings"]
    assert [one["check"] for one in findings if one["mark"] == "WRONG"] == [
        "vae"
    ]  # it is untrained
    found = {one["check"] for one in findings if one["mark"] == "ok"}
    assert found >= {"ratio", "gradients", "noise 0", "prompts"}
    assert not [one for one in findings if "repeat another" in one["text"]]
    call = [
        "--model_path",
        i2v_folder,
        "--prompt",
        "a red circle",
        "--image",
        pictures[0],
        "--num_inference_steps",
        2,
    ]
    call += [
        "--device",
        "cpu",
        "--checkpoint_path",
        checkpoint,
        "--output_path",
        tmp_path / "clips",
    ]
    generate.main([str(word) for word in call])
    assert len(list((tmp_path / "clips").glob("*.mp4"))) == 1
