"""A new backbone, reward, world and SDE: one file each and one row in a table, as docs/extending.md says."""

import dataclasses
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import generate
import post_train
from sage_grpo.algo import sde
from sage_grpo.config.fields import FIELDS
from sage_grpo.data.requests import Request, read_requests
from sage_grpo.models.registry import open_backbone
from sage_grpo.rewards.registry import REWARDS
from sage_grpo.runs.history import read_run
from sage_grpo.tools import evaluate
from sage_grpo.tools.doctor import __main__ as doctor
from sage_grpo.tools.plan import __main__ as plan
from sage_grpo.worlds.registry import WORLDS
from tests.smallest_run import command_line, slow, write_trivial_model
from tests.trivial_backbone import Trivial

ROOT = Path(__file__).parents[1]


class Redness:
    """A reward: how red a clip is, and how little it changes."""

    names = ("red", "calm")

    def check(self, prompts):
        if any("secret" in prompt for prompt in prompts):
            raise ValueError("the reward red keeps no secrets")

    def score(self, clips, prompts, fps):
        clips = [clip.double() / 255 for clip in clips]
        red = [clip[..., 0].mean() - clip[..., 1:].mean() for clip in clips]
        return {
            "red": torch.stack(red),
            "calm": -torch.stack([clip.diff(dim=0).abs().mean() for clip in clips]),
        }


class GrayWorld:
    """A world in which every clip is one shade of gray."""

    name, reward = "gray", "red"

    def check(self, prompts):
        if any("purple" in prompt for prompt in prompts):
            raise ValueError("nothing is purple in a gray world")

    def gold(self, clips, requests):
        return {"distance": (clips.double() / 255).flatten(1).std(1).cpu()}

    def draw(self, prompts, frames, height, width, seed):
        return torch.full((len(prompts), frames, height, width, 3), 128, dtype=torch.uint8)

    def vae_floor(self, backbone):
        clips = self.draw([""], 5, 16, 16, 0)
        return {
            "distance": self.gold(backbone.decode(backbone.encode_video(clips)), [""])["distance"]
            .mean()
            .item()
        }


@pytest.fixture
def folder(quick, tmp_path, monkeypatch):
    """A model of the second backbone and the second world: one line in a table for each, and one for the reward."""
    monkeypatch.setitem(REWARDS, "red", lambda setup: Redness())
    monkeypatch.setitem(WORLDS, "gray", GrayWorld)
    model = write_trivial_model(tmp_path / "model")
    (model / "world.json").write_text('{"world": "gray"}')
    (model / "prompts_train.txt").write_text("a red wall\na blue wall\n")
    (model / "prompts_valid.txt").write_text("a green wall\n")
    return model


def words(folder, **changes):
    """The command line of a short run; a flag that is None is left out."""
    flags = {
        "pretrained_model_root": folder, "output_dir": folder.with_name("run"), "max_steps": 2, "batch_size": 4,
        "num_generations": 2, "num_sampling_steps": 3, "validation_num_inference_steps": 2, "validate_at_step0": True,
        "validation_videos": 0, "save_interval": 1, "reward_weights": {"red": 1.0, "calm": 0.5}, "report_to": "none",
        "learning_rate": 0.01, "kl_weight": 0.1, "dtype": "fp32",
    } | changes  # fmt: skip
    return command_line({name: value for name, value in flags.items() if value is not None})


@pytest.mark.parametrize("use_lora", [False, slow(True)])
def test_a_second_backbone_trains_resumes_and_samples(folder, use_lora, capsys):
    """Slow: with an adapter."""
    assert post_train.main(words(folder, use_lora=use_lora)) == 0
    run = folder.with_name("run")
    history = read_run(run)
    assert [line["step"] for line in history.full_lines] == [1, 2] and len(history.validations) == 2
    first = history.full_lines[0]
    assert first["policy/ratio_max_deviation"] == 0 and first["policy/grad_norm"] > 0
    assert first["reward/total"] == pytest.approx(first["reward/red"] + 0.5 * first["reward/calm"])
    assert history.head["world"] == "gray" and history.head["vae_floor"][
        "distance"
    ] == pytest.approx(0, abs=1e-9)
    assert "gold/distance" in history.validations[-1]
    again = words(
        folder, use_lora=use_lora, resume_from_checkpoint=run / "checkpoints" / "step-000001"
    )
    again[again.index("--output_dir") + 1] = str(folder.with_name("again"))
    assert post_train.main(again) == 0
    state = "checkpoints/step-000002/trainer/rank-00000.safetensors"
    straight, resumed = (load_file(folder.with_name(name) / state) for name in ("run", "again"))
    assert straight and all(torch.equal(straight[name], resumed[name]) for name in straight)
    capsys.readouterr()
    for name, path in (
        ("base", []),
        ("trained", ["--checkpoint_path", str(run / "checkpoints" / "step-000002")]),
    ):
        output = [
            "--output_path",
            str(folder.with_name(name)),
            "--prompt",
            "a wall",
            "--num_inference_steps",
            "2",
        ]
        generate.main(["--model_path", str(folder), *path, *output, "--score", "red"])
    scores = [
        json.loads(next(folder.with_name(n).glob("*.json")).read_text())["scores"]
        for n in ("base", "trained")
    ]
    assert scores[0] != scores[1]


def test_a_second_backbone_through_every_tool(folder, capsys):
    run, own = folder.with_name("run"), words(folder)
    assert post_train.main(own) == 0
    assert (
        doctor.main(
            [*words(folder, overwrite=True), "--output", str(run.with_name("doctor")), "--skip_ab"]
        )
        == 0
    )
    assert plan.main([*own, "--gpus", "2", "--batch_size", "2"]) == 0
    assert "219" not in capsys.readouterr().err
    checkpoint = run / "checkpoints" / "step-000002"
    assert (
        evaluate.main(
            [*own, "--checkpoints", str(checkpoint), "--output", str(run.with_name("evaluation"))]
        )
        == 0
    )
    result = json.loads((run.with_name("evaluation") / "evaluation.json").read_text())
    base, trained = result["systems"].values()
    assert base["columns"]["red"]["mean"] != trained["columns"]["red"]["mean"]


def test_what_the_plug_ins_refuse_is_one_sentence(folder, capsys):
    (folder / "prompts_train.txt").write_text("a purple wall\n")
    assert post_train.main(words(folder)) == 2
    assert capsys.readouterr().err.strip().endswith("nothing is purple in a gray world")
    (folder / "prompts_train.txt").write_text("a secret wall\n")
    assert post_train.main(words(folder)) == 2
    assert capsys.readouterr().err.strip().endswith("the reward red keeps no secrets")
    (folder / "model_index.json").write_text('{"_class_name": "MysteryPipeline"}')
    assert post_train.main(words(folder)) == 2
    assert (
        "names 'MysteryPipeline', which cannot be trained here; choose one of"
        in capsys.readouterr().err
    )
    assert not folder.with_name("run").exists()


def test_the_table_decides_the_class(folder, tiny_folder):
    assert (
        type(open_backbone(folder)) is Trivial and type(open_backbone(tiny_folder)) is not Trivial
    )


def half_of_dance(sigma, sigma_next, eta):
    return 0.5 * sde.dance_variance(sigma, sigma_next, eta)


def test_a_new_sde_is_a_function_and_its_name(folder, monkeypatch):
    monkeypatch.setitem(sde.SDES, "half_dance", sde.euler_maruyama(half_of_dance))
    field = FIELDS["sde_type"]
    metadata = dict(field.metadata) | {"choices": (*field.metadata["choices"], "half_dance")}
    known = dataclasses.field(default=field.default, metadata=metadata)
    monkeypatch.setitem(FIELDS, "sde_type", known)
    assert post_train.main(words(folder, sde_type="half_dance")) == 0
    half, full = (
        sde.build_schedule(name, sde.flow_sigmas(3, 3.0), 0.5).std
        for name in ("half_dance", "dance_grpo")
    )
    torch.testing.assert_close(half, full / 2**0.5)
    std = read_run(folder.with_name("run")).head["schedule"]["std"]
    assert std == pytest.approx(half.tolist())


PLUGINS = """
import torch


class Shade:
    names = ("light", "dark")

    def __init__(self, setup):
        self.device = setup.device

    def score(self, clips, prompts, fps):
        light = torch.stack([clip.double().mean() / 255 for clip in clips])
        return {"light": light, "dark": 1 - light}


class Picky:
    def check(self, prompts):
        raise ValueError(f"no model can draw {prompts[0]}")

    def score(self, clips, prompts):
        return [0.0 for _ in clips]


def build(setup):
    return Shade(setup)


def table(sigma, sigma_next, eta):
    return torch.ones_like(sigma), sigma_next - sigma, eta * sigma_next


def short(sigma, sigma_next, eta):
    return table(sigma[1:], sigma_next[1:], eta)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    for file, name in (("my_reward.py", "def calm"), ("my_sde.py", "def level_variance")):
        Path(file).write_text(
            next(b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if name in b)
        )
    Path("own.py").write_text(PLUGINS)
    return "own.py"


def test_plug_ins_from_a_file_train_without_touching_the_package(folder, own, capsys):
    flags = words(
        folder,
        reward_weights='{"calm": 2, "Shade": {"light": 1, "dark": 0}}',
        sde_type="my_sde.py:level_variance",
    )
    flags += [
        "--reward_model",
        "my_reward.py:calm",
        f"{own}:Shade",
        "--holdout_reward",
        "my_reward.py:calm",
    ]
    assert post_train.main(flags) == 0
    run = folder.with_name("run")
    history = read_run(run)
    first, last = history.full_lines[0], history.validations[-1]
    assert first["reward/total"] == pytest.approx(
        2 * first["reward/calm.calm"] + first["reward/Shade.light"]
    )
    assert last["holdout/calm"] == pytest.approx(last["reward/calm.calm"])
    variance = (0.5 * sde.flow_sigmas(3, 3.0)[1:]) ** 2
    assert history.head["schedule"]["std"] == pytest.approx(variance.sqrt().tolist())
    digest = hashlib.sha256(PLUGINS.encode()).hexdigest()[:8]
    assert history.head["fingerprints"]["plug-ins"][own] == digest
    Path(own).write_text(PLUGINS + "\n# changed\n")
    capsys.readouterr()
    assert post_train.main([*flags, "--max_steps", "3", "--resume_from_checkpoint", "auto"]) == 0
    assert f"plug-ins own.py '{digest}' -> " in capsys.readouterr().err
    output = [
        "--output_path",
        str(folder.with_name("clips")),
        "--prompt",
        "a wall",
        "--num_inference_steps",
        "2",
    ]
    generate.main(
        [
            "--model_path",
            str(folder),
            *output,
            "--score",
            f"{own}:Shade",
            "--sde_type",
            f"{own}:table",
        ]
    )
    record = json.loads(next(folder.with_name("clips").glob("*.json")).read_text())
    assert record["scores"].keys() == {"light", "dark"} and record["sde_type"] == f"{own}:table"


def test_a_plug_in_is_seen_by_the_doctor_and_counts_1_if_it_has_a_single_score(folder, own, capsys):
    plug_ins = {"reward_model": "my_reward.py:calm", "sde_type": "my_sde.py:level_variance"}
    flags = words(folder, reward_weights=None, **plug_ins)
    output = folder.with_name("doctor")
    doctor.main([*flags, "--output", str(output), "--prompts", "2", "--clips", "2"])
    said = capsys.readouterr().out
    assert "* my_sde.py:level_variance" in said and "my_sde.py:level_variance at eta 0" in said
    assert post_train.main(flags) == 0
    first = read_run(folder.with_name("run")).full_lines[0]
    assert first["reward/total"] == first["reward/calm"]


@pytest.mark.parametrize(("flag", "name", "sentence"), [
    ("reward_model", "none.py:calm", "none.py:calm cannot be loaded: FileNotFoundError"),
    ("reward_model", "own.py:Calm", "own.py:Calm cannot be loaded: AttributeError"),
    ("reward_model", "own.py:PLUGINS", "own.py:PLUGINS cannot be loaded: AttributeError"),
    ("reward_model", "own.py:torch", "the reward own.py:torch cannot be built: TypeError"),
    ("reward_model", "bad.py:calm", "bad.py:calm cannot be loaded: SyntaxError"),
    ("reward_model", "own.py:Picky", "no model can draw a red wall"),
    ("reward_model", "own.py:build", "reward_weights must have a number for each of build's light, dark"),
    ("sde_type", "own.py:short", "sde_type own.py:short cannot be used"),
    ("sde_type", "own.py:Calm", "own.py:Calm cannot be loaded: AttributeError"),
])  # fmt: skip
def test_a_plug_in_that_cannot_be_used_is_one_sentence(folder, own, capsys, flag, name, sentence):
    Path("bad.py").write_text("def calm(clips, prompts:\n")
    plug_ins = {"reward_model": "my_reward.py:calm"} | {flag: name}
    flags = words(folder, reward_weights=None, **plug_ins)
    assert post_train.main(flags) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"post_train.py: {sentence}") and said.count("\n") == 1
    assert not folder.with_name("run").exists()


def test_two_plug_ins_of_one_name_are_refused(folder, own, capsys):
    Path("other.py").write_text(Path("my_reward.py").read_text())
    assert (
        post_train.main([*words(folder), "--reward_model", "my_reward.py:calm", "other.py:calm"])
        == 2
    )
    assert "two rewards are called calm; rename one of them" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["reward_model", "holdout_reward", "sde_type"])
def test_a_configuration_alone_cannot_name_a_file(folder, own, capsys, flag):
    Path(own).write_text("open('ran', 'w')\n" + PLUGINS)
    Path("c.yaml").write_text(f"{flag}: {own}:calm\n")
    assert post_train.main([*words(folder), "--config", "c.yaml"]) == 2
    said = capsys.readouterr().err
    assert (
        f"a file alone may not choose; give --{flag} {own}:calm" in said
        and not Path("ran").exists()
    )


def test_the_examples_of_the_page_run():
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL
    )
    assert len(blocks) >= 4  # a rewriter of prompts, a reward, an SDE, a world
    for block in blocks:
        exec(compile(block, "docs/extending.md", "exec"), {"__name__": "example"})


def test_a_rewriter_makes_the_long_prompts_from_the_short_ones(tmp_path):
    """The script of docs/extending.md with a command that shouts."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (tmp_path / "rewrite.py").write_text(
        re.search(r"```python\n(.*?rewrite\.py.*?)```", page, re.DOTALL)[1]
    )
    (tmp_path / "short.csv").write_text(
        'index,seed,prompt\n4,11,"a sign, ""OPEN"""\n7,,a café\n', encoding="utf-8"
    )
    shout = [sys.executable, "-c", "print('A caption:', input().upper(), '', sep='\\n')"]
    command = [sys.executable, "rewrite.py", "short.csv", "long.csv", *shout]
    subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}, check=True
    )
    expected = [Request('A caption: A SIGN, "OPEN"', 4, 11), Request("A caption: A CAFÉ", 7, None)]
    assert read_requests(tmp_path / "long.csv") == expected


def test_no_other_file_of_the_package_names_the_second_backbone():
    """If one has to learn about it, the interface is mended instead."""
    package = ROOT / "sage_grpo"
    others = [file for file in package.rglob("*.py") if file.parent.name != "wan"]
    named = [
        file
        for file in others
        if re.search(r"\bwan(2[12].*|\w*pipeline)?\b", file.read_text(), re.IGNORECASE)
    ]
    assert [file.relative_to(package).as_posix() for file in named] == ["models/registry.py"]
