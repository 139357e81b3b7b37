"""An export samples exactly like its checkpoint, in either layout, and what cannot be exported is rejected."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import generate
from sage_grpo.config.fields import Config
from sage_grpo.config.parse import from_values, parse
from sage_grpo.data.requests import Request
from sage_grpo.files import manifest
from sage_grpo.models import comfyui
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.lora import LORA_FILE, read_scaled_adapter
from sage_grpo.models.registry import open_backbone
from sage_grpo.models.sample import counter_noise
from sage_grpo.models.weights import open_folder
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.runs import media
from sage_grpo.train.build import build_trainer
from scripts import export_checkpoint as script
from tests.hostile import sealed_again
from tests.programs import exit_code, flag_list
from tests.smallest_run import slow

ROOT = Path(__file__).parents[2]
PROMPT = "a red circle moving left"


@pytest.fixture(scope="module")
def checkpoints(tiny_folder, tmp_path_factory):
    """Checkpoints of one iteration each, by what was trained. Read-only."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "prompts.txt").write_text(PROMPT + "\n")
    shared = {
        "pretrained_model_root": str(tiny_folder),
        "train_prompts": str(folder / "prompts.txt"),
        "reward_model": "shapes",
        "report_to": "none",
        "batch_size": 2,
        "num_generations": 2,
        "num_sampling_steps": 2,
        "num_frames": 5,
        "height": 16,
        "width": 16,
        "guidance_scale": 1.0,
        "max_steps": 1,
        "learning_rate": 0.02,
        "lora_r": 4,
        "lora_alpha": 12,
        "validation_prompts": str(folder / "prompts.txt"),
        "validation_num_inference_steps": 2,
        "validate_video_length": 5,
        "validation_fixed_size": "16x16",
    }
    paths = {}
    for name, flags in {"full": {"ema_decay": 0.5}, "lora": {"use_lora": True}}.items():
        config = from_values(shared | flags | {"output_dir": str(folder / name)})
        build_trainer(config, Ranks(0, 1, torch.device("cpu"))).train()
        paths[name] = folder / name / "checkpoints" / "step-000001"
    return paths


@torch.no_grad()
def velocity(model, checkpoint=None):
    """The model's velocity for one fixed noisy clip."""
    backbone = open_backbone(model)
    backbone.load_weights(checkpoint)
    shape = (1, *backbone.latent_shape(5, 32, 32))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    (cond,) = backbone.encode([Request(PROMPT)])
    return backbone.velocity(x, 0.5, cond, Guidance())


def replaced(model, target, place, exported):
    """A model folder with an exported transformer."""
    shutil.copytree(model, target)
    shutil.rmtree(target / place)
    shutil.copytree(exported, target / place)
    return target


def run(checkpoint, output, layout, *more):
    flags = {"checkpoint": checkpoint, "output": output, "layout": layout}
    return exit_code(script.main, [*flag_list(flags), *map(str, more)])


@pytest.mark.parametrize("kind", ["full", slow("lora")])
@pytest.mark.parametrize(
    "layout, place", [("diffusers", "transformer"), ("tencent", "transformer/480p_t2v")]
)
def test_an_exported_transformer_samples_as_its_checkpoint(
    checkpoints, tiny_folder, tencent_folder, tmp_path, kind, layout, place
):
    assert run(checkpoints[kind], tmp_path / "out", layout) == 0
    manifest.check(tmp_path / "out")
    base = tiny_folder if layout == "diffusers" else tencent_folder
    exported = velocity(replaced(base, tmp_path / "model", place, tmp_path / "out"))
    expected = velocity(tiny_folder, checkpoints[kind])
    assert (expected - velocity(tiny_folder)).abs().max() > 0.01
    if kind == "full":
        assert torch.equal(exported, expected)
    else:
        torch.testing.assert_close(exported, expected, rtol=1e-5, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_stock_diffusers_loads_a_merged_adapter(checkpoints, tmp_path):
    from diffusers import HunyuanVideo15Transformer3DModel

    assert run(checkpoints["lora"], tmp_path / "out", "diffusers") == 0
    model, info = HunyuanVideo15Transformer3DModel.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.task_type == "t2v"
    assert model.config.num_layers == 2


def test_an_adapter_in_a_model_of_tencents_layout(
    checkpoints, tiny_folder, tencent_folder, tmp_path
):
    out = tmp_path / "out"
    assert run(checkpoints["lora"], out, "diffusers", "--model_path", tencent_folder) == 0
    exported = velocity(replaced(tiny_folder, tmp_path / "model", "transformer", out))
    expected = velocity(tiny_folder, checkpoints["lora"])
    torch.testing.assert_close(exported, expected, rtol=1e-5, atol=1e-5)


def test_an_adapter_is_copied(checkpoints, tiny_folder, tmp_path):
    assert run(checkpoints["lora"], tmp_path / "out", "lora") == 0
    assert (tmp_path / "out" / LORA_FILE).read_bytes() == (
        checkpoints["lora"] / LORA_FILE
    ).read_bytes()
    assert torch.equal(
        velocity(tiny_folder, tmp_path / "out"), velocity(tiny_folder, checkpoints["lora"])
    )


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_one_file_for_comfyui_named_like_the_folder(checkpoints, tmp_path, kind):
    out = tmp_path / "my_run"
    assert run(checkpoints[kind], out, "comfyui", "--dtype", "bfloat16") == 0
    manifest.check(out)
    assert {path.name for path in out.iterdir()} == {
        "my_run.safetensors",
        "README.md",
        manifest.NAME,
    }
    exported = load_file(out / "my_run.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}

    if kind == "lora":
        adapter, scale = read_scaled_adapter(checkpoints[kind] / LORA_FILE)
        expected = comfyui.lora(adapter, scale)
        assert scale == 3
    else:
        weights = comfyui.all_weights(open_folder(checkpoints[kind] / "transformer"))
        expected = {name: weights.read(name) for name in weights.names}
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name].bfloat16()) for name in expected)

    place = {"lora": "ComfyUI/models/loras", "full": "ComfyUI/models/diffusion_models"}[kind]
    card = (checkpoints[kind] / "README.md").read_text()
    assert f"`{place}`" in card
    assert ("strength 1.0" in card) == (kind == "lora")


def test_what_cannot_be_exported_is_one_sentence(checkpoints, tiny_folder, tmp_path, capsys):
    def refused(words, *arguments):
        assert run(*arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".out.*"))

    out = tmp_path / "out"
    damaged = shutil.copytree(checkpoints["lora"], tmp_path / "damaged")
    content = bytearray((damaged / LORA_FILE).read_bytes())
    content[-1] ^= 1
    (damaged / LORA_FILE).write_bytes(content)
    refused(f"{LORA_FILE} was changed after it was written", damaged, out, "lora")
    refused("manifest.json cannot be read", tiny_folder, out, "diffusers")
    refused("holds all weights and no adapter", checkpoints["full"], out, "lora")
    refused(
        "--model_path is for adapters",
        checkpoints["full"],
        out,
        "diffusers",
        "--model_path",
        tiny_folder,
    )
    refused(
        "Model folder 'nowhere' does not exist",
        checkpoints["lora"],
        out,
        "diffusers",
        "--model_path",
        "nowhere",
    )
    refused(
        "--dtype is for --layout comfyui", checkpoints["lora"], out, "lora", "--dtype", "bfloat16"
    )
    other = shutil.copytree(tiny_folder, tmp_path / "other")
    shutil.copytree(
        ROOT / "assets" / "tiny" / "transformer", other / "transformer", dirs_exist_ok=True
    )
    refused("does not fit", checkpoints["lora"], out, "diffusers", "--model_path", other)
    (tmp_path / "there").mkdir()
    assert run(checkpoints["lora"], tmp_path / "there", "lora") == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("export_interval", [0, 1])
def test_a_model_without_tencents_layout_is_refused_before_anything_is_written(
    make, tmp_path, capsys, monkeypatch, export_interval
):
    """Shards, and all weights; tests/train/test_experts.py has adapters."""
    trainer = make(save_interval=1, export_interval=export_interval)
    trainer.validation = None
    trainer.train()
    checkpoint = trainer.run.path / "checkpoints" / "step-000001"
    assert (checkpoint / "transformer").is_dir() == bool(export_interval)

    monkeypatch.setattr(script, "save_weights", None)
    capsys.readouterr()
    assert run(checkpoint, tmp_path / "out", "tencent") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is not of HunyuanVideo-1.5" in line and "use --layout diffusers" in line
    assert not list(tmp_path.glob("*out*"))


def test_settings_that_tencent_cannot_tell_are_refused(checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints["full"] / "transformer", tmp_path / "transformer")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_refiner_layers": 1}))
    with pytest.raises(ValueError, match="num_refiner_layers is 1; use --layout diffusers"):
        script.write_tencent(folder, tmp_path / "tencent")


def test_weights_without_a_place_in_tencents_layout_are_not_written():
    with pytest.raises(
        ValueError, match=r"^the tensor lora\.weight has no place in Tencent's layout$"
    ):
        script.to_tencent("transformer", ["lora.weight"])
    names = ["context_embedder.token_refiner.refiner_blocks.0.attn.to_q.weight"]
    with pytest.raises(
        ValueError, match=r"self_attn_qkv\.weight .* cannot be put together: 2 parts are missing$"
    ):
        script.to_tencent("transformer", names)


# page, kind of checkpoint -> where the lines of that page expect it
DOCUMENTED = {
    ("README.md", "full"): "outputs/tiny_cpu/checkpoints/step-000080",
    ("docs/models.md", "full"): "outputs/tiny_cpu/checkpoints/step-000080",
    ("docs/models.md", "lora"): "outputs/lora/checkpoints/step-000080",
}


def documented(page, checkpoint):
    """The lines of a page that load a checkpoint and sample a clip from it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (loading,) = (block for block in blocks if f'"{checkpoint}"' in block and "Pipeline" in block)
    if "clip = " in loading:
        return loading
    (sampling,) = (block for block in blocks if block.startswith("clip = "))
    return loading + sampling


@pytest.mark.parametrize(
    ("page", "name"),
    [("README.md", "full"), slow("docs/models.md", "full"), slow("docs/models.md", "lora")],
)
def test_the_documented_lines_sample_what_generate_samples(
    checkpoints, tiny_folder, tmp_path, monkeypatch, page, name
):
    """Exactly the lines of the page, in stock diffusers, and generate.py, from the same latents."""
    from diffusers import HunyuanVideo15Pipeline

    model = Path("assets/tiny")
    checkpoint = Path(DOCUMENTED[page, name])
    lines = documented(page, checkpoint)
    monkeypatch.chdir(tmp_path)
    for place, there in ((model, tiny_folder), (checkpoint, checkpoints[name])):
        place.parent.mkdir(parents=True)
        place.symlink_to(there)
    latents, _ = counter_noise(open_backbone(model).latent_shape(9, 48, 48), 7, [0])
    monkeypatch.setattr(HunyuanVideo15Pipeline, "prepare_latents", lambda *args, **kwargs: latents)
    variables = {}
    exec(lines, variables)
    of_diffusers = variables["clip"]

    written = []
    monkeypatch.setattr(media, "write_mp4", lambda path, clip, fps: written.append(clip))
    flags = {
        "model_path": model,
        "checkpoint_path": checkpoint,
        "output_path": "clips",
        "prompt": "a small cyan circle moving up",
        "fixed_size": "48x48",
        "num_frames": 9,
        "num_inference_steps": 3,
        "seed": 7,
    }
    generate.main(flag_list(flags))
    (of_generate,) = written
    assert of_diffusers.shape == of_generate.shape == (9, 48, 48, 3)
    assert np.abs(255 * of_diffusers - of_generate.numpy()).max() <= 1


@pytest.mark.parametrize("name", ["lora", "full"])
def test_the_lines_of_the_model_card_load_the_trained_weights(checkpoints, tiny_folder, name):
    card = (checkpoints[name] / "README.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    lines = lines.replace("MODEL", str(tiny_folder)).replace("FOLDER", str(checkpoints[name]))
    variables = {}
    exec(lines, variables)
    weights = variables["pipe"].transformer.state_dict()
    base = load_file(next((tiny_folder / "transformer").glob("*.safetensors")))
    if name == "full":
        assert any(not torch.equal(weights[key], base[key]) for key in base)
    else:
        assert any("lora_B" in key and value.any() for key, value in weights.items())


@pytest.mark.parametrize("name", ["lora", "full"])
def test_the_model_card_says_what_was_trained_and_how_to_repeat_it(checkpoints, name, tmp_path):
    card = (checkpoints[name] / "README.md").read_text()
    front = card.split("---\n")[1]
    recipe = re.search(r"```yaml\n(.*?)```", card, re.DOTALL)[1]
    assert yaml.safe_load(front)["library_name"] == "diffusers"
    assert "license applies" in card
    (tmp_path / "again.yaml").write_text(recipe)
    config = parse(["--config", str(tmp_path / "again.yaml")])
    assert config.use_lora == (name == "lora")
    assert config.learning_rate != Config().learning_rate
    assert "output_dir" not in recipe
    assert "1 iterations" in card
    assert "to raise the reward" in card
    state = json.loads((checkpoints[name] / "trainer" / "state.json").read_text())
    assert f"base weights: {state['fingerprints']['base weights']}." in card
    all_flags = {field.name for field in dataclasses.fields(Config)}
    assert yaml.safe_load(recipe).keys() < all_flags - {"eta", "seed"}


@pytest.mark.parametrize(
    "name, layout, relation",
    [
        ("lora", "lora", "adapter"),
        slow("lora", "diffusers", "finetune"),
        ("full", "diffusers", "finetune"),
        slow("full", "tencent", "finetune"),
        ("lora", "comfyui", "adapter"),
        slow("full", "comfyui", "finetune"),
    ],
)
def test_an_exported_folder_has_a_card_whose_lines_load_it(
    checkpoints, tiny_folder, tmp_path, name, layout, relation
):
    out = tmp_path / "out"
    assert run(checkpoints[name], out, layout) == 0
    manifest.check(out)
    card = (out / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["base_model"] == "tencent/HunyuanVideo-1.5"
    assert front["license_name"] == "tencent-hunyuan-community"
    assert front["base_model_relation"] == relation
    assert re.findall(r"^\| (\d+) \|", card, re.MULTILINE) == ["1"]
    original = (checkpoints[name] / "README.md").read_text()
    assert card.partition("## Recipe")[2] == original.partition("## Recipe")[2]

    lines = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(lines) == (layout not in ("tencent", "comfyui"))
    assert ("ComfyUI/models" in card) == (layout == "comfyui")
    for text in lines:
        exec(text.replace("MODEL", str(tiny_folder)).replace("FOLDER", str(out)), {})


def test_a_checkpoint_that_was_moved_has_a_card_without_results(checkpoints, tmp_path):
    moved = shutil.copytree(checkpoints["lora"], tmp_path / "a" / "b" / "mine")
    assert run(moved, tmp_path / "out", "lora") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "1 iterations" in card and "| 1 |" not in card


def hostile_checkpoint(folder, secrets):
    """A checkpoint of others, whose transformer is a link to a folder of the user."""
    folder.mkdir()
    (folder / "trainer").mkdir()
    (folder / "trainer" / "state.json").write_text("{}")
    hashes = {"trainer/state.json": manifest.file_sha256(folder / "trainer" / "state.json")}
    (folder / manifest.NAME).write_text(json.dumps({"files": hashes}))
    (folder / "transformer").symlink_to(secrets)
    return folder


def test_a_linked_folder_is_not_exported(tmp_path, capsys):
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("secret")
    checkpoint = hostile_checkpoint(tmp_path / "step-000001", tmp_path / "secrets")
    assert run(checkpoint, tmp_path / "out", "diffusers") == 2
    assert "transformer is not in manifest.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_appears_during_the_export_is_kept(
    checkpoints, tmp_path, monkeypatch, capsys
):
    def write_card(*_):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("precious")

    monkeypatch.setattr(script, "write_card", write_card)
    assert run(checkpoints["lora"], tmp_path / "out", "lora") == 2
    assert "out appeared during the export" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "thesis.txt"]


def test_an_existing_folder_with_the_name_of_a_draft_is_kept(tmp_path, capsys):
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "precious").write_text("precious")
    checkpoint = tmp_path / "step-000001"
    (checkpoint / "transformer").mkdir(parents=True)
    (checkpoint / "transformer" / "config.json").write_text("{}")
    hashes = {
        "transformer/config.json": manifest.file_sha256(checkpoint / "transformer/config.json")
    }
    (checkpoint / manifest.NAME).write_text(json.dumps({"files": hashes}))
    assert run(checkpoint, tmp_path / "out", "diffusers") == 0
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.tmp", "step-000001"}
    assert (tmp_path / "out.tmp" / "precious").read_text() == "precious"


@pytest.mark.parametrize(
    "state",
    [
        "",
        "[]",
        "{}",
        '{"config": "x"}',
        '{"config": 1e400}',
        '{"config": []}',
        '{"config": {}}',
        '{"config": {"pretrained_model_root": 5}}',
        '{"config": {"pretrained_model_root": "a\\nb"}}',
    ],
)
def test_a_checkpoint_that_does_not_name_its_model_is_one_sentence(tmp_path, capsys, state):
    checkpoint = hostile_checkpoint(tmp_path / "step-000001", tmp_path)
    (checkpoint / "transformer").unlink()
    (checkpoint / "trainer" / "state.json").write_text(state)
    sealed_again(checkpoint)
    assert run(checkpoint, tmp_path / "out", "diffusers") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(checkpoint / "trainer" / "state.json") in line
    assert {path.name for path in tmp_path.iterdir()} == {"step-000001"}


def test_an_output_that_cannot_be_a_folder_is_refused_first(tmp_path, capsys):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for output in ("file", "link", "file/out", "x" * 300):
        assert run(tmp_path / "missing", tmp_path / output, "diffusers") == 2
        assert "output" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}
