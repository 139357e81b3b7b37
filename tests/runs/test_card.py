"""The model card: what it says about a run, and its curve. tests/scripts/test_export_checkpoint.py runs its lines."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from sage_grpo.models.registry import open_backbone
from sage_grpo.runs.card import model_card
from sage_grpo.runs.history import column, read_run
from sage_grpo.train.export import origin_of
from tests.tools.fake_run import make_run, read_lines, write_lines

ROOT = Path(__file__).parents[2]

FACTS = {"step": 4, "reward": "VQ + 2 TA", "base": "0123abcd"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Read-only."""
    return make_run(tmp_path_factory.mktemp("runs") / "run", iterations=4, every=2, prompts=3)


@pytest.mark.parametrize("use_lora", [True, False])
def test_the_card_says_what_was_trained_from_what_for_what(folder, use_lora):
    recipe = {"pretrained_model_root": "ckpts/video", "use_lora": use_lora, "eta": 0.7}
    card = model_card(recipe, read_run(folder), **FACTS)["README.md"]
    assert ("An adapter of video" in card, ".load_lora_adapter(" in card) == (use_lora, use_lora)
    assert ("All weights of video" in card, "AutoModel.from_pretrained(" in card) == (
        not use_lora,
        not use_lora,
    )
    assert "for 4 iterations" in card
    assert "the reward VQ + 2 TA" in card
    assert "base weights: 0123abcd" in card
    settings = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert settings == recipe | {"pretrained_model_root": "video"}


def test_the_card_shows_held_out_rewards_in_a_table_and_those_of_the_rollouts_as_a_curve(
    folder, monkeypatch
):
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda axes, *points: drawn.append(points))
    run = read_run(folder)
    files = model_card({"pretrained_model_root": "video", "use_lora": True}, run, **FACTS)
    values = column(run.validations, "reward/total")
    rows = "".join(
        f"| {step} | {value:.3f} |\n" for step, value in zip((0, 2, 4), values, strict=True)
    )
    assert f"|---|---|\n{rows}\n" in files["README.md"] and "(curves.png)" in files["README.md"]
    assert Image.open(io.BytesIO(files["curves.png"])).format == "PNG"
    ((steps, rewards),) = drawn
    assert steps.tolist() == [1, 2, 3, 4]
    assert np.array_equal(rewards, column(run.full_lines, "reward/total"))


def test_a_run_with_a_single_reward_has_no_curve_and_without_validations_no_table(folder, tmp_path):
    lines = [
        line | {"reward/total": None if line["step"] > 1 else 0.5} for line in read_lines(folder)
    ]
    write_lines(tmp_path, [line for line in lines if line["kind"] != "validation"])
    files = model_card(
        {"pretrained_model_root": "video", "use_lora": True}, read_run(tmp_path), **FACTS
    )
    assert files.keys() == {"README.md"}
    assert "curves.png" not in files["README.md"]
    assert "| it" not in files["README.md"]


HIGH, LOW = "transformer", "transformer_2"
WHOLE = 'AutoModel.from_pretrained("FOLDER")'
PARTS = {
    name: f'pipe.{name} = AutoModel.from_pretrained("FOLDER", subfolder="{name}")'
    for name in (HIGH, LOW)
}
ADAPTERS = {
    HIGH: 'transformer.load_lora_adapter("FOLDER", weight_name="pytorch_lora_weights.safetensors")',
    LOW: 'transformer_2.load_lora_adapter("FOLDER", weight_name="pytorch_lora_weights_2.safetensors")',
}
SIDES = ("NAME/NAME_high_noise.safetensors", "NAME/NAME_low_noise.safetensors")


@pytest.mark.parametrize(
    "number, experts, layout, loads",
    [
        (1, [HIGH], "diffusers", [WHOLE]),
        (2, [HIGH], "diffusers", [PARTS[HIGH]]),
        (2, [LOW], "diffusers", [PARTS[LOW]]),
        (2, [HIGH, LOW], "diffusers", list(PARTS.values())),
        (1, [HIGH], "lora", [ADAPTERS[HIGH], "writes `NAME/NAME.safetensors`."]),
        (2, [HIGH], "lora", [ADAPTERS[HIGH], f"writes `{SIDES[0]}`.", "of high noise levels"]),
        (2, [LOW], "lora", [ADAPTERS[LOW], f"writes `{SIDES[1]}`.", "of low noise levels"]),
        (2, [HIGH, LOW], "lora", [*ADAPTERS.values(), f"writes `{SIDES[0]}` and `{SIDES[1]}`."]),
        (1, [HIGH], "comfyui", []),
        (2, [HIGH], "comfyui", ["of high noise levels"]),
        (2, [LOW], "comfyui", ["of low noise levels"]),
    ],
)
def test_the_card_loads_the_transformers_that_were_trained_of_one_or_two(
    folder, number, experts, layout, loads
):
    recipe = {"pretrained_model_root": "ckpts/video", "use_lora": True}
    about = {"experts": experts, "num_transformers": number, "layout": layout}
    run = read_run(folder)
    card = model_card(recipe, run, **FACTS, **about, comfyui=layout == "lora")["README.md"]
    known = [WHOLE, *PARTS.values(), *ADAPTERS.values()]
    known += ["of high noise levels", "of low noise levels"]
    assert [text for text in known if text in card] == [text for text in loads if text in known]
    assert all(text in card for text in loads)
    assert ("Put both files" in card) == (len(experts) > 1 and layout == "lora")
    written = re.findall(r"`NAME/(\w+)\.safetensors`", card)
    assert len(written) == (len(experts) if layout == "lora" else 0)


HUNYUAN = {
    "base_model": "tencent/HunyuanVideo-1.5",
    "license": "other",
    "license_name": "tencent-hunyuan-community",
    "license_link": "https://huggingface.co/tencent/HunyuanVideo-1.5/blob/main/LICENSE",
}


@pytest.mark.parametrize(
    "version, expected",
    [
        ("480p_t2v", HUNYUAN),
        ("720p_i2v", HUNYUAN),
        (
            "wan21-1.3b",
            {"base_model": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "license": "apache-2.0"},
        ),
        ("wan21-14b", {"base_model": "Wan-AI/Wan2.1-T2V-14B-Diffusers", "license": "apache-2.0"}),
        ("assets/tiny", {"license": "apache-2.0"}),
    ],
)
@pytest.mark.parametrize("use_lora", [True, False])
def test_the_card_names_the_base_model_and_its_license(folder, version, expected, use_lora):
    """Published models are named by their versions; so is the embedded model, which has the classes of one of them."""
    if version == "assets/tiny":
        backbone = open_backbone(ROOT / version)
    else:
        backbone = open_backbone("nowhere", version=version, complete=False)
    recipe = {"pretrained_model_root": "ckpts", "use_lora": use_lora}
    card = model_card(recipe, read_run(folder), **FACTS, origin=origin_of(backbone))["README.md"]
    front = yaml.safe_load(card.split("---\n")[1])
    if "base_model" in expected:
        expected = expected | {"base_model_relation": "adapter" if use_lora else "finetune"}
    assert {name: front[name] for name in front if name.startswith(("base_model", "license"))} == (
        expected
    )
    assert front["library_name"] == "diffusers"


def test_no_text_of_a_run_becomes_markup_or_ends_the_recipe(folder):
    fence = "x ```\n```\n# hacked <script>"
    recipe = {
        "pretrained_model_root": "/home/me/<b>*m*",
        "use_lora": True,
        "sde_type": fence,
        "train_prompts": "a " * 60 + "``` b",
    }
    facts = FACTS | {"reward": "<img src=x> [VQ](http://evil)\n# title \033[2J"}
    card = model_card(recipe, read_run(folder), **facts)["README.md"]
    assert "\n# \\<b\\>\\*m\\*, post-trained\n" in card
    assert "\\<img src=x\\> \\[VQ\\](http\\://evil) \\# title ?\\[2J." in card

    opening, yaml_text, _ = re.split(r"^````+(?:yaml)?\n", card, flags=re.MULTILINE)
    assert "## Recipe" in opening
    assert yaml.safe_load(yaml_text)["sde_type"] == fence


def test_a_card_names_no_folder_and_no_address_of_the_machine(folder):
    recipe = {
        "pretrained_model_root": "/home/me/video",
        "use_lora": True,
        "output_dir": "/secret/run",
        "remote_reward_url": "http://inside:8000",
        "reward_model": ["/home/me/r.py:score", "videoalign"],
        "train_prompts": ["client/prompts.csv"],
        "sde_type": "client/sde.py:mine",
    }
    card = model_card(recipe, read_run(folder), **FACTS)["README.md"]
    for private in ("/home", "secret", "inside", "client"):
        assert private not in card
    assert "pretrained_model_root: video\n" in card
    assert "- r.py:score\n- videoalign\n" in card
