"""Publishing on a stand-in of the hub: what arrives, what never does, and how an interrupted upload goes on."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
import yaml
from safetensors.torch import load

from sage_grpo.config.parse import from_values
from sage_grpo.files import manifest
from sage_grpo.models.lora import LORA_FILE
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.tools import publish
from sage_grpo.train.build import build_trainer
from tests.smallest_run import smallest_run
from tests.tools.hub import TOKEN, stand_in

# the client's own
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

ROOT = Path(__file__).parents[2]
REPO = "someone/shapes-lora"
HOSTILE = 'the letter "B" <script>alert(1)</script> | moving up'


@pytest.fixture(scope="module")
def run(tiny_folder, tmp_path_factory):
    """A run with an adapter and one with all weights, of one iteration each, and validations. Read-only."""
    folder = tmp_path_factory.mktemp("home_of_the_user")
    runs = {}
    for name, changes in {"lora": {"use_lora": True}, "full": {}}.items():
        flags = smallest_run(
            tiny_folder,
            folder,
            output_dir=str(folder / name),
            max_steps=1,
            validation_videos=2,
            validate_at_step0=True,
            **changes,
        )
        build_trainer(from_values(flags), Ranks(0, 1, torch.device("cpu"))).train()
        runs[name] = folder / name / "checkpoints" / "step-000001"
    return runs


@pytest.fixture
def hub(monkeypatch):
    with stand_in() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
    assert not hub.unknown


def call(checkpoint, *more, repo=REPO):
    return publish.main([str(checkpoint), "--repo", repo, *more])


@pytest.mark.parametrize(
    "kind, weights",
    [
        ("lora", {LORA_FILE, "shapes-lora_comfyui.safetensors"}),
        ("full", {"transformer/config.json", "transformer/diffusion_pytorch_model.safetensors"}),
    ],
)
def test_card_weights_and_clips_arrive_and_nothing_else(run, hub, kind, weights, capsys):
    assert call(run[kind]) == 0
    assert hub.repos[REPO]["private"] is True
    files = hub.repos[REPO]["files"]
    clips = {file for file in files if file.startswith("samples/")}
    assert files.keys() - clips == weights | {"README.md"}  # a run of one iteration has no curve
    assert clips and all(files[clip][4:8] == b"ftyp" for clip in clips)
    assert f"{hub.address}/{REPO}" in capsys.readouterr().out

    card = files["README.md"].decode()
    assert yaml.safe_load(card.split("---\n")[1])["library_name"] == "diffusers"
    for clip in clips:
        assert f'src="{clip}"' in card
    assert "Training used 3 prompts" in card and "- trained on: prompts.txt\n" in card
    assert ("`shapes-lora_comfyui.safetensors` of this repository" in card) == (kind == "lora")
    for name in weights:
        if name.endswith(".safetensors"):
            assert load(files[name])


def test_one_adapter_of_two_is_named_by_its_noise_levels(run, hub, tmp_path):
    """tests/train/test_experts.py publishes runs of models with two transformers."""
    state = json.loads((run["lora"] / "trainer" / "state.json").read_text())
    state["config"]["lora_experts"] = "high"
    target = tmp_path / "checkpoints" / "step-000001"
    changed(run["lora"], target, "trainer/state.json", json.dumps(state).encode())
    assert call(target) == 0
    files = hub.repos[REPO]["files"]
    ours = "shapes-lora_high_noise_comfyui.safetensors"
    assert [name for name in files if "comfyui" in name] == [ours]
    assert f"`{ours}` of this repository is" in files["README.md"].decode()


def test_nothing_about_the_machine_leaves_it(run, hub):
    for kind, checkpoint in run.items():
        call(checkpoint, repo=f"someone/{kind}")
        for name, content in hub.repos[f"someone/{kind}"]["files"].items():
            words = [str(checkpoint.parent), "home_of_the_user", str(Path.home())]
            words += ["optimizer", "metrics.jsonl", "command.txt"]
            if len(socket.gethostname()) > 5:  # shorter ones are found in any video
                words.append(socket.gethostname())
            for word in words:
                assert word.encode() not in content, (name, word)


def test_a_dry_run_lists_the_files_and_sends_nothing(run, hub, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    assert call(run["lora"], "--dry_run") == 0
    listed = {line.split("bytes")[1].strip() for line in capsys.readouterr().out.splitlines()[:-1]}
    assert {"README.md", LORA_FILE, "shapes-lora_comfyui.safetensors"} <= listed
    assert not hub.repos and not hub.puts


def test_after_an_interruption_only_what_is_missing_is_sent(run, hub, capsys):
    hub.refused_puts = 1
    with pytest.raises(SystemExit) as stopped:
        call(run["lora"])
    assert stopped.value.code == 2
    assert "run the command again to continue" in capsys.readouterr().err
    assert not hub.repos[REPO]["files"]  # a repository changes in one commit or not at all

    assert call(run["lora"]) == 0
    assert hub.commits == 1
    assert len(hub.puts) == len(set(hub.puts)) == len(hub.large)


@pytest.mark.parametrize("private, flags, code", [(False, [], 2), (False, ["--public"], 0)])
def test_nothing_becomes_public_by_accident(run, hub, private, flags, code):
    hub.repos[REPO] = {"private": private, "files": {}}
    if code:
        with pytest.raises(SystemExit) as stopped:
            call(run["lora"], *flags)
        assert stopped.value.code == code and not hub.repos[REPO]["files"]
    else:
        assert call(run["lora"], *flags) == code and hub.repos[REPO]["files"]


def changed(checkpoint, target, name, content):
    """A copy of a checkpoint, in a run folder of its own, with another file."""
    shutil.copytree(checkpoint, target)
    (target / name).write_bytes(content)
    hashes = manifest.read(target) | {name: manifest.file_sha256(target / name)}
    (target / manifest.NAME).write_text(json.dumps({"files": hashes}))
    return target


@pytest.mark.parametrize("text", [
    "in /mnt/cluster/someone/run", "on trainer-17.example", "on file:///data/jane/m", r"on file\:///data",
    "-/data/jane/m", "on trainer:/data/jane/m",
])  # fmt: skip
def test_a_card_with_a_path_or_a_host_is_not_sent(run, hub, tmp_path, text, monkeypatch, capsys):
    monkeypatch.setattr(socket, "gethostname", lambda: "trainer-17.example")
    card = (run["lora"] / "README.md").read_text() + f"Trained {text}.\n"
    target = tmp_path / "checkpoints" / "step-000001"
    changed(run["lora"], target, "README.md", card.encode())
    with pytest.raises(SystemExit) as stopped:
        call(target)
    assert stopped.value.code == 2 and "nothing was sent" in capsys.readouterr().err
    assert not hub.repos


def test_addresses_and_relative_paths_are_no_paths_of_this_machine():
    for text in ("https://hub.example/a/b", "runs/a/b", "a-/b/c", "configs/x.yaml", "./a/b/c"):
        assert not publish.ABSOLUTE_PATH.search(text)


STATE = "trainer/state.json"


@pytest.mark.parametrize("change, words", [
    ({"fingerprints": [1]}, "state.json has fingerprints [1]"),
    ({"config": [1]}, "state.json has config [1]"),
    ({"config": {"train_prompts": {"a": 1}}}, "has train_prompts {'a': 1}"),
    ("{", "state.json cannot be read"),
], ids=str)  # fmt: skip
def test_a_malformed_state_is_one_sentence(run, tmp_path, change, words, capsys):
    text = change
    if isinstance(change, dict):
        text = json.dumps(json.loads((run["full"] / STATE).read_text()) | change)
    target = changed(run["full"], tmp_path / "step-000001", STATE, text.encode())
    with pytest.raises(SystemExit) as stopped:
        call(target, "--dry_run")
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and words in error and error.count("\n") == 1


def test_folders_of_prompt_files_are_not_sent(run, hub, tmp_path):
    state = json.loads((run["lora"] / STATE).read_text())
    state["config"]["train_prompts"] = ["clients/acme/p.txt"]
    target = changed(run["lora"], tmp_path / "step-000001", STATE, json.dumps(state).encode())
    call(target)
    card = hub.repos[REPO]["files"]["README.md"].decode()
    assert "- trained on: p.txt\n" in card and "acme" not in card


def test_hostile_prompts_and_clips_of_others_stay_text_and_stay_here(run, hub, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run["lora"].parents[1], folder)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for listing in folder.glob("validation/*/clips.json"):
        records = json.loads(listing.read_text())
        for record in records:
            record["prompt"] = HOSTILE
        records.append(records[0] | {"file": "linked.mp4", "seed": 99})
        (listing.parent / "linked.mp4").symlink_to(secret)
        listing.write_text(json.dumps(records))
    win_rate = {"mean": 0.7, "low": 0.6, "high": 0.8, "count": 40}
    comparison = {"system": "mine", "other": HOSTILE, "win_rate": win_rate}
    questions = {"overall": {"comparisons": [comparison]}}
    study = {"kind": "preferences", "raters": {"ann": {}, "bob": {}}, "questions": questions}
    (folder / "preferences.json").write_text(json.dumps(study))
    call(folder / "checkpoints" / "step-000001")
    files = hub.repos[REPO]["files"]
    assert "70% (60% to 80%) of 40 answers by 2 raters" in files["README.md"].decode()
    assert b"secret" not in b"".join(files.values())
    assert "<script>" not in files["README.md"].decode()


def test_wrong_input_is_one_sentence(run, hub, tmp_path, monkeypatch, capsys):
    shards = tmp_path / "checkpoints" / "step-000002"
    shutil.copytree(run["full"], shards)
    shutil.rmtree(shards / "transformer")
    hashes = manifest.read(run["full"])
    kept = {name: sha for name, sha in hashes.items() if not name.startswith("transformer")}
    (shards / manifest.NAME).write_text(json.dumps({"files": kept}))
    cases = [
        ((shards.parent,), "manifest.json cannot be read"),
        ((shards,), "has no transformer/"),
        ((run["lora"], "no_user"), "it must be USER/NAME"),
        ((run["lora"], "a/b/c"), "Repo id must"),
    ]
    for (checkpoint, *repo), words in cases:
        with pytest.raises(SystemExit) as stopped:
            call(checkpoint, repo=(repo or [REPO])[0])
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and words in error and error.count("\n") == 1

    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(SystemExit):
        call(run["lora"])
    assert "hf auth login" in capsys.readouterr().err
    assert not hub.repos


@pytest.mark.slow
def test_the_program_takes_address_and_token_from_the_environment(run, tmp_path):
    """Beyond its fast siblings: the real program in a process of its own, with the client's own settings."""
    with stand_in() as hub:
        environment = os.environ | {
            "HF_ENDPOINT": hub.address,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(tmp_path),
            "HF_HUB_DISABLE_XET": "1",
        }
        subprocess.run(
            [sys.executable, "-m", "sage_grpo.tools.publish", run["lora"], "--repo", REPO],
            cwd=ROOT,
            env=environment,
            check=True,
        )
        assert LORA_FILE in hub.repos[REPO]["files"]
        assert not hub.unknown
