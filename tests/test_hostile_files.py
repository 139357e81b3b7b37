"""Files made to run code are rejected or ignored: the marker that their code would leave never appears."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import post_train
from sage_grpo.data.requests import Request, read_requests
from sage_grpo.models.embeddings import Embeddings
from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.models.hunyuan15.folder import DIFFUSERS_FILES, ModelFolder
from sage_grpo.models.hunyuan15.text import TextEncoder
from sage_grpo.models.lora import LORA_FILE
from sage_grpo.rewards.videoalign.folder import read_weights
from tests.hostile import change, write_bomb

REQUEST = Request('the letter "B" moving left')
CODE = "!!python/object/apply:os.system ['touch {marker}']"


@pytest.fixture
def marker(tmp_path):
    path = tmp_path / "marker"
    yield path
    assert not path.exists(), "code from a file ran"


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A model folder that may be changed."""
    return shutil.copytree(tiny_folder, tmp_path / "model")


@pytest.fixture
def unopened(monkeypatch):
    """Nothing may even be tried with torch.load."""
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load was called"))


def embed(folder):
    backbone = Hunyuan15(folder)
    [cond] = backbone.encode([REQUEST])
    assert backbone.transformer.config and backbone.vae.config
    return backbone, cond


@pytest.mark.parametrize("name", ["a.safetensors", "a.bin"])
def test_the_bombs_of_these_tests_work(tmp_path, name):
    file, trace = write_bomb(tmp_path / name, tmp_path / "trace"), tmp_path / "trace"
    pickle.loads(file.read_bytes()) if file.suffix == ".safetensors" else torch.load(
        file, weights_only=False
    )
    assert trace.exists()


def test_torch_files_beside_safetensors_are_never_opened(tiny_folder, folder, marker, unopened):
    for part in DIFFUSERS_FILES:
        for name in (
            "pytorch_model.bin",
            "diffusion_pytorch_model.bin",
            "model.pt",
            "model.pth",
            "adapter_model.bin",
        ):
            write_bomb(folder / part / name, marker)
    (_, found), (_, expected) = embed(folder), embed(tiny_folder)
    assert torch.equal(found.text, expected.text) and torch.equal(found.glyph, expected.glyph)


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "text_encoder_2"])
def test_a_bomb_in_the_place_of_weights_is_refused(folder, marker, part):
    (file,) = (folder / part).glob("*.safetensors")
    write_bomb(file, marker)
    with pytest.raises(ValueError, match=f"{file} is not a complete safetensors file"):
        embed(folder)


def test_a_bomb_in_the_prompt_cache_is_refused(tiny_folder, tmp_path, marker):
    cpu = torch.device("cpu")
    encoder = TextEncoder(ModelFolder(tiny_folder), cpu, torch.float32)
    embeddings = Embeddings(encoder, cpu, tmp_path / "cache")
    write_bomb(embeddings.path(REQUEST), marker)
    with pytest.raises(ValueError, match=r"is damaged .*; delete it"):
        embeddings([REQUEST])


def test_a_model_cannot_bring_its_own_classes(tiny_folder, folder, marker):
    for part in DIFFUSERS_FILES:
        (folder / part / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
        classes = dict.fromkeys(("AutoConfig", "AutoModel", "AutoTokenizer"), "own.Own")
        (config,) = (folder / part).glob("*config.json")
        change(config, auto_map=classes, trust_remote_code=True)
    assert torch.equal(embed(folder)[1].text, embed(tiny_folder)[1].text)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_model_cannot_choose_an_attention_to_download(folder, key):
    for part in ("text_encoder", "text_encoder_2"):
        change(folder / part / "config.json", **{key: "somebody/attention"})
    backbone, _ = embed(folder)
    assert {model.config._attn_implementation for model in backbone.embeddings.encoder._models} <= {
        "sdpa",
        "eager",
    }


def test_a_model_cannot_lead_to_another_one(tiny_folder, folder):
    for part in ("text_encoder", "text_encoder_2"):
        settings = {
            "base_model_name_or_path": "/elsewhere",
            "peft_type": "LORA",
            "target_modules": ["q_proj"],
        }
        (folder / part / "adapter_config.json").write_text(json.dumps(settings))
    assert torch.equal(embed(folder)[1].text, embed(tiny_folder)[1].text)


def test_a_chat_template_cannot_reach_the_system(folder, marker):
    line = f"{{{{ cycler.__init__.__globals__.os.system('touch {marker}') }}}}"
    (folder / "tokenizer" / "chat_template.jinja").write_text(line)
    with pytest.raises(Exception, match="unsafe"):
        embed(folder)


def lora(folder, width, **settings):
    """A LoRA of one layer."""
    folder.mkdir()
    shapes = {"lora_A": (2, width), "lora_B": (width, 2)}
    weights = {
        f"transformer_blocks.0.attn.to_q.{name}.weight": torch.zeros(shape)
        for name, shape in shapes.items()
    }
    plain = {
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["transformer_blocks.0.attn.to_q"],
        "init_lora_weights": False,
    }
    save_file(weights, folder / LORA_FILE, {"lora_adapter_metadata": json.dumps(plain | settings)})
    return folder


SETTINGS = {
    "megatron_config": {"a": 1},
    "layer_replication": [[0, 9]],
    "modules_to_save": ["x"],
    "corda_config": {"a": 1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_lora_cannot_choose_what_peft_does(tiny_folder, tmp_path, name):
    backbone = Hunyuan15(tiny_folder)
    width = backbone.transformer.transformer_blocks[0].attn.to_q.in_features
    with pytest.raises(ValueError, match=f"is not a plain LoRA: its settings name '{name}'"):
        backbone.load_weights(lora(tmp_path / "bad", width, **{name: SETTINGS[name]}))
    backbone.load_weights(lora(tmp_path / "good", width))


def test_a_bomb_in_the_place_of_a_lora_is_refused(tiny_folder, tmp_path, marker, unopened):
    write_bomb(tmp_path / "lora" / "pytorch_lora_weights.bin", marker)
    with pytest.raises(FileNotFoundError, match="has neither"):
        Hunyuan15(tiny_folder).load_weights(tmp_path / "lora")
    write_bomb(tmp_path / "lora" / LORA_FILE, marker)
    with pytest.raises(ValueError, match=f"{LORA_FILE} is not a complete safetensors file"):
        Hunyuan15(tiny_folder).load_weights(tmp_path / "lora")


def test_the_torch_file_of_a_reward_is_tensors_or_nothing(tmp_path, marker, unopened, monkeypatch):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    write_bomb(tmp_path / "model.pth", marker)
    assert read_weights(tmp_path / "model.safetensors").keys() == {"a"}
    monkeypatch.undo()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.pth is damaged or holds more than tensors"):
        read_weights(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "line", [CODE, "!!python/name:os.system", "!!python/module:os", "!!python/object:os.Own {{}}"]
)
@pytest.mark.parametrize("key", ["eta", "reward_weights", "output_dir"])
def test_yaml_makes_no_objects(tmp_path, marker, capsys, key, line):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"output_dir: {tmp_path / 'run'}\n".replace(key, "seed")
        + f"{key}: {line.format(marker=marker)}\n"
    )
    assert post_train.main(["--config", str(config)]) == 2
    said = capsys.readouterr().err
    assert "could not determine a constructor" in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("suffix, content", [
    (".txt", CODE), (".csv", f'prompt\n"{CODE}"\n'), (".jsonl", json.dumps({"prompt": CODE})),
])  # fmt: skip
def test_a_prompt_is_text(tmp_path, marker, suffix, content):
    file = tmp_path / f"prompts{suffix}"
    file.write_text(
        content.format(marker=marker)
        if suffix != ".jsonl"
        else content.replace("{marker}", str(marker))
    )
    assert [prompt.text for prompt in read_requests(file)] == [CODE.format(marker=marker)]
    write_bomb(file, marker)
    with pytest.raises(ValueError):
        read_requests(file)


@pytest.mark.parametrize("value", ["os.system", "sage_grpo.worlds.shapes.reward.ShapesReward", "own:Own", "/tmp/own.py",
                                   "own.py", "../own", "!own", "os"])  # fmt: skip
@pytest.mark.parametrize("flag", ["reward_model", "holdout_reward", "sde_type", "optimizer", "report_to", "dtype",
                                  "advantage_std", "kl_schedule", "kl_feedback", "step_kl_estimator"])  # fmt: skip
def test_a_configuration_cannot_name_code(tiny_folder, tmp_path, monkeypatch, capsys, flag, value):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("open('ran', 'w')\nclass Own: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = [
        "--pretrained_model_root",
        str(tiny_folder),
        "--batch_size",
        "4",
        "--output_dir",
        "run",
    ]
    assert post_train.main([*arguments, f"--{flag}", value]) == 2
    said = capsys.readouterr().err
    assert value in said and "choose" in said and said.count("\n") == 1
    assert not Path("ran").exists() and not Path("run").exists()
