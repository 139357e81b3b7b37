"""The doctor on the embedded model: no problems; then on the trivial one, with everything broken once."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import post_train
from sage_grpo.algo.sde import SDES, build_schedule, euler_maruyama, flow_sigmas
from sage_grpo.config.parse import parse
from sage_grpo.rewards.registry import REWARDS
from sage_grpo.tools.doctor import __main__ as doctor
from sage_grpo.tools.doctor.machine import memory_result
from sage_grpo.tools.doctor.samplers import cost_result
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.train import build
from sage_grpo.worlds.shapes.reward import ShapesReward
from tests.programs import exit_code
from tests.smallest_run import command_line, slow, write_trivial_model
from tests.trivial_backbone import Trivial

ROOT = Path(__file__).parents[3]
TINY = ROOT / "assets" / "tiny"
RECIPE = ["--config", str(ROOT / "configs" / "hunyuan15_8gpu.yaml"), "--device", "cuda"]
PROMPTS = 'a red circle moving left\na large green letter "T" moving up slowly\na blue square moving down\n'
LIGHT = {
    "num_sampling_steps": 2, "batch_size": 2, "num_generations": 2, "guidance_scale": 1,
    "enable_gradient_checkpointing": False, "reward_model": "shapes",
}  # fmt: skip
SMALL = {"num_frames": 5, "height": 24, "width": 24}


class Doctor:
    """Calls the program with a light configuration and keeps what it said."""

    def __init__(self, model: Path, folder: Path, capsys: pytest.CaptureFixture) -> None:
        self.model = model
        self.folder = folder
        self.capsys = capsys
        self.output = folder / "doctor"
        self.train = folder / "train.txt"
        self.held_out = folder / "held_out.txt"
        self.train.write_text(PROMPTS)
        self.held_out.write_text("a cyan circle moving right\n")

    def arguments(self, **flags: object) -> list[str]:
        values = LIGHT | {"train_prompts": self.train, "validation_prompts": self.held_out}
        values |= {"pretrained_model_root": self.model, "output_dir": self.folder / "run"} | flags
        return command_line(values)

    def __call__(self, *doctor_flags: str, **flags: object) -> int:
        arguments = [*self.arguments(**flags), "--output", str(self.output), *doctor_flags]
        code = exit_code(doctor.main, arguments)
        captured = self.capsys.readouterr()
        self.text = " ".join(captured.out.split())
        self.errors = captured.err
        return code

    @property
    def record(self) -> dict:
        return json.loads((self.output / "doctor.json").read_text())

    def findings(self, check: str) -> list[dict]:
        return [finding for finding in self.record["findings"] if finding["check"] == check]

    def wrong(self) -> list[str]:
        findings = self.record["findings"]
        return [finding["check"] for finding in findings if finding["mark"] == "WRONG"]


@pytest.fixture
def run_doctor(quick, tmp_path, capsys):
    """The doctor of a trivial model of the shapes world."""
    model = write_trivial_model(tmp_path / "trivial")
    (model / "world.json").write_text('{"world": "shapes"}')
    return Doctor(model, tmp_path, capsys)


@pytest.fixture
def embedded_doctor(quick, tmp_path, capsys):
    """The doctor of the embedded model, which can be sampled in 8 bits and has heads, a VAE and a learned reward."""
    return Doctor(TINY, tmp_path, capsys)


CHECKS = {
    "config", "batch", "layout", "prompts", "vae", "reward", "noise", "noise 0", "ratio", "gradients", "balance",
    "samplers",
}  # fmt: skip
CHECKS_OF_THE_MODEL = {"sampling", "latents", "damage"}  # which needs trained weights


def test_all_is_well(run_doctor):
    assert run_doctor("--prompts", "2", "--clips", "2", eta=0.3) == 0
    assert "All is well" in run_doctor.text and not run_doctor.wrong()
    assert not (run_doctor.folder / "run").exists()
    findings = run_doctor.record["findings"]
    assert {finding["check"] for finding in findings} >= CHECKS_OF_THE_MODEL
    passed = {finding["check"] for finding in findings if finding["mark"] == "ok"}
    assert passed - CHECKS_OF_THE_MODEL == CHECKS
    batch, few_prompts = run_doctor.findings("batch")
    assert batch["numbers"] == {
        "clips_per_iteration": 2, "ranks": 1, "micro_batches_per_rank": 1, "clips_per_micro_batch": 2,
        "trained_clips": 2, "trained_steps": 2, "pairs_per_update": 4,
    }  # fmt: skip
    assert few_prompts["mark"] == "note" and "1 prompt(s) per update" in few_prompts["text"]
    assert run_doctor.findings("ratio")[0]["numbers"]["deviation"] == 0
    assert run_doctor.findings("reward")[0]["numbers"]["wrong"] == []
    assert "3 clips total VQ MQ TA good" in run_doctor.text
    check_comparison(run_doctor)


def check_comparison(run_doctor: Doctor) -> None:
    rows = run_doctor.findings("samplers")[0]["numbers"]["rows"]
    assert next(iter(rows)) == "ode" and set(rows) == set(SDES)
    assert (run_doctor.output / "samplers.png").is_file()
    for name, row in rows.items():
        std = build_schedule(name, flow_sigmas(2, 3.0), 0.3).std
        assert row["noise"] == pytest.approx(std.square().sum().item(), rel=1e-5)
        assert row["failed"] == 0 and row["spread"] > 0 and row["reward +-"] > 0
        assert row["reward"] == pytest.approx(0.5 * row["VQ"] + 0.5 * row["MQ"] + row["TA"])
        assert row["vs ode"] == pytest.approx(row["reward"] - rows["ode"]["reward"])
    assert rows["ode"]["noise"] == 0 and rows["precise"]["vs ode"] != 0
    assert "* sage_grpo" in run_doctor.text and "prompt_distance" in run_doctor.text


@pytest.fixture
def uncompared(monkeypatch):
    """The samplers are not compared, which takes most of the time; `test_all_is_well` compares them."""
    monkeypatch.setattr(doctor, "check_samplers", lambda *arguments, **options: iter(()))


def asked(doctor: Doctor, check: str, count: int = 3, **flags: object) -> list[str]:
    """The marks of a check that samples the embedded model, on few and small clips."""
    flags = SMALL | {"num_sampling_steps": 4} | flags
    code = doctor("--prompts", str(count), "--clips", str(count), **flags)
    assert code == 0, doctor.text
    return [finding["mark"] for finding in doctor.findings(check)]


@pytest.mark.usefixtures("uncompared")
@pytest.mark.parametrize("shift, mark", [(3.2, "ok"), (60.0, "note")])
def test_a_shift_that_misplaces_the_steps_is_noted(run_doctor, shift, mark):
    """The trivial model has a shift of 3; its clips are noise, so their rewards say nothing."""
    flags = {"num_sampling_steps": 4, "timestep_shift": shift, "guidance_scale": 2}
    run_doctor("--prompts", "3", "--clips", "2", **flags)
    rollouts, validation = run_doctor.findings("sampling")
    assert (rollouts["mark"], validation["mark"]) == (mark, "ok")
    assert (rollouts["numbers"]["times_as_far"] > 1.25) is (mark == "note")


@pytest.mark.slow
@pytest.mark.usefixtures("uncompared")
def test_the_model_is_asked_what_a_run_cannot_tell(embedded_doctor, tmp_path):
    """Slow, because only a trained model has an answer: a wrong shift and a wrong scale of the VAE are noted."""
    assert asked(embedded_doctor, "sampling") == ["ok", "ok"]
    assert embedded_doctor.findings("latents")[0]["mark"] == "ok"
    assert embedded_doctor.findings("damage")[0]["mark"] == "ok"
    assert asked(embedded_doctor, "sampling", timestep_shift=1.0) == ["note", "ok"]

    model = tmp_path / "scaled"
    shutil.copytree(TINY, model)
    config_file = model / "vae" / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(config | {"scaling_factor": 2 * config["scaling_factor"]}))
    embedded_doctor.model = model
    assert asked(embedded_doctor, "latents", count=2) == ["note"]
    assert embedded_doctor.findings("latents")[0]["numbers"]["ratio"] > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "nft"])
def test_lossy_steps_are_compared_with_exact_ones(embedded_doctor, algorithm):
    """Slow: steps in 8 bits, for which the trivial model is too narrow; the other findings are tested below."""
    flags = SMALL | {
        "num_sampling_steps": 4,
        "sde_window": "random:1",
        "outside_window": "fp8",
    }
    embedded_doctor("--prompts", "2", "--clips", "2", algorithm=algorithm, **flags)
    (finding,) = embedded_doctor.findings("lossy steps")
    assert 0 < finding["numbers"]["pixels"] < 30 and finding["numbers"]["change"] != 0
    assert embedded_doctor.findings("ratio")[0]["mark"] == "ok"
    if algorithm == "grpo":
        assert "exact" in embedded_doctor.findings("samplers")[0]["numbers"]["rows"]


@pytest.mark.parametrize("algorithm", [slow("awm"), "nft"])
def test_an_algorithm_without_an_sde_is_judged_by_its_own_clips(run_doctor, algorithm):
    """It samples with guidance and trains without."""
    flags = {
        "algorithm": algorithm,
        "guidance_scale": 2,
        "timestep_fraction": 0.5,
    }
    run_doctor("--prompts", "2", "--clips", "2", **flags)
    assert run_doctor.findings("ratio")[0]["mark"] == "ok" and not run_doctor.findings("balance")
    assert f"{algorithm} injects none" in run_doctor.text and f"* {algorithm}" in run_doctor.text
    assert [finding["mark"] for finding in run_doctor.findings("noise")] == ["ok"]
    rows = run_doctor.findings("samplers")[0]["numbers"]["rows"]
    assert rows[algorithm]["noise"] == 0 and rows[algorithm]["spread"] > 0


@pytest.mark.parametrize("algorithm", ["grpo", "nft"])
def test_the_update_has_as_many_clips_as_are_trained(run_doctor, algorithm):
    flags = {"algorithm": algorithm, "batch_size": 4, "num_generations": 4, "train_clips": 2}
    assert run_doctor("--skip_ab", **flags) == 0
    batch = run_doctor.findings("batch")[0]["numbers"]
    assert (batch["clips_per_iteration"], batch["trained_clips"]) == (4, 2)
    assert batch["pairs_per_update"] == 2 * batch["trained_steps"]
    ratio = run_doctor.findings("ratio")[0]["numbers"]
    assert ratio == {"pairs": 2 * batch["trained_steps"], "deviation": 0}


def test_a_resumed_policy_that_lags_is_no_wrong_arithmetic(run_doctor):
    flags = {"algorithm": "nft", "nft_decay_growth": 0.5, "learning_rate": 1e-3}
    more = {"max_steps": 2, "validation_interval": 0, "report_to": "none"}
    assert post_train.main(run_doctor.arguments(**flags, **more)) == 0
    assert run_doctor("--skip_ab", resume_from_checkpoint="auto", **flags, **more) == 0
    assert run_doctor.findings("ratio")[0]["mark"] == "ok"


def test_balance_is_the_gradient_of_each_step(run_doctor):
    assert run_doctor("--skip_ab", num_sampling_steps=3, use_grad_balancing=False) == 0
    rows = run_doctor.findings("balance")[0]["numbers"]["rows"]
    assert [row[0] for row in rows] == [0, 1, 2]
    for _, _, _, expected, gradient, scale, equalized in rows:
        assert scale == pytest.approx(rows[1][3] / expected, rel=1e-4)
        assert equalized == pytest.approx(gradient * scale)
    assert rows[2][4] > 3 * rows[0][4]  # late steps push harder, which is what the equalizer is for


def test_adapters_wait_for_their_second_half(run_doctor):
    assert run_doctor("--skip_ab", use_lora=True, sde_window="all_but_last") == 0
    assert "2 of 4 trained tensors" in run_doctor.text
    assert "2 lora_A wait for their lora_B, which starts at 0" in run_doctor.text


def test_ranks_are_planned_not_started(run_doctor):
    flags = {"num_generations": 4, "sde_type": "precise", "eta": 1.0}
    assert run_doctor("--skip_ab", "--ranks", "8", **flags) == 0
    batch = run_doctor.findings("batch")[0]
    assert "16 clips per iteration: 4 prompt(s) x groups of 4, 8 rank(s)" in batch["text"]
    assert run_doctor.findings("noise")[0]["numbers"]["over"] == []


def test_one_training_prompt_is_noted(run_doctor):
    run_doctor.train.write_text("a red circle moving left\n")
    run_doctor("--skip_ab")
    assert {"count": 1} in [finding["numbers"] for finding in run_doctor.findings("prompts")]


def test_what_is_no_error_is_noted(run_doctor):
    old = run_doctor.folder / "run" / "metrics.jsonl"
    old.parent.mkdir()
    old.write_text("{}\n")
    run_doctor.held_out.write_text("a red circle moving left\n")
    run_doctor.train.write_text(PROMPTS + "a red circle moving left\n")
    assert run_doctor("--skip_ab", "--ranks", "1", eta=1.0, gpus=2) == 0
    assert "already holds a run" in run_doctor.text
    clips = "an iteration has 2 clips instead of 4"
    assert f"it is meant for 2 rank(s) and there are 1: {clips}" in run_doctor.text
    assert list(old.parent.iterdir()) == [old] and old.read_text() == "{}\n"
    assert "1 of the training prompts repeat another one" in run_doctor.text
    assert "1 of the held-out prompts are also trained on" in run_doctor.text
    assert run_doctor.findings("noise")[0]["numbers"]["over"] == [0]


@pytest.mark.parametrize("cost, error, notes", [(0.5, 0.1, 0), (2.0, 0.1, 1), (2.0, 0.8, 0)])
def test_exploration_that_costs_more_than_it_spreads_is_noted(cost, error, notes):
    row = {"vs ode": -cost, "vs ode +-": error, "spread": 1.0}
    assert len(list(cost_result("dance_grpo", row))) == notes


@pytest.mark.slow
def test_the_demo_is_not_warned_about(embedded_doctor):
    """Adds the shipped recipe itself, with its model, reward and noise, to the checks of small ones."""
    arguments = [
        "--config",
        str(ROOT / "configs" / "tiny_cpu.yaml"),
        "--prompts",
        "2",
        "--clips",
        "2",
    ]
    arguments += ["--output_dir", str(embedded_doctor.folder / "run")]
    arguments += ["--output", str(embedded_doctor.output)]
    assert exit_code(doctor.main, arguments) == 0
    findings = embedded_doctor.record["findings"]
    assert {finding["mark"] for finding in findings} == {"ok"}
    assert {finding["check"] for finding in findings} == CHECKS | CHECKS_OF_THE_MODEL


def expect_wrong(run_doctor: Doctor, check: str, *texts: str, **flags: object) -> None:
    """Only this check complains."""
    assert run_doctor("--prompts", "1", "--clips", "2", **flags) == 1
    assert run_doctor.wrong() == [check]
    assert "remedy:" in run_doctor.text and f"WRONG: {check}" in run_doctor.text
    for text in texts:
        assert text in run_doctor.text


def test_a_forward_that_differs_in_training(run_doctor, monkeypatch):
    plain = Trivial.velocity

    def noisy(self, x, *rest):
        return plain(self, x, *rest) + torch.is_grad_enabled() * 1e-2 * torch.randn_like(x)

    monkeypatch.setattr(Trivial, "velocity", noisy)
    expect_wrong(
        run_doctor, "ratio", "differs from 1 by up to", "every gradient would be wrong", "dropout"
    )


def spoil_training(monkeypatch, name: str, trained: bool) -> None:
    """Makes the named parameter require a gradient, or not, after the trainer has chosen what it trains."""
    plain = build.trainable_parameters

    def spoilt(transformer, use_lora):
        chosen = plain(transformer, use_lora)
        dict(transformer.named_parameters())[name].requires_grad_(trained)
        return chosen

    monkeypatch.setattr(build, "trainable_parameters", spoilt)


def test_a_trained_parameter_that_is_frozen(run_doctor, monkeypatch):
    spoil_training(monkeypatch, "leave.weight", False)
    expect_wrong(
        run_doctor,
        "gradients",
        "of 8 trained",
        "leave.weight has no gradient although it is trained",
    )


def test_a_frozen_parameter_with_a_gradient(run_doctor, monkeypatch):
    spoil_training(monkeypatch, "enter.weight", True)
    expect_wrong(
        run_doctor,
        "gradients",
        "enter.weight has a gradient although it is frozen",
        use_lora=True,
    )


def test_paths_that_are_not_finite(run_doctor, monkeypatch):
    plain = Trivial.velocity
    monkeypatch.setattr(
        Trivial,
        "velocity",
        lambda self, x, *rest: plain(self, x, *rest) * (1 if len(x) == 1 else torch.nan),
    )
    expect_wrong(run_doctor, "rollout", "2 of 2 trajectories are not finite", "lower eta (0.5)")


def test_a_check_that_breaks_off(run_doctor, monkeypatch):
    plain = Trivial.velocity

    def stops(self, x, *rest):
        if torch.is_grad_enabled():
            raise RuntimeError("no kernel for this shape\nand more")
        return plain(self, x, *rest)

    monkeypatch.setattr(Trivial, "velocity", stops)
    expect_wrong(run_doctor, "update", "RuntimeError: no kernel for this shape")
    assert "in stops" in run_doctor.findings("update")[0]["numbers"]["traceback"]


class LovesNoise(ShapesReward):
    def score(self, clips, prompts, fps):
        return {name: -values for name, values in super().score(clips, prompts, fps).items()}


class Fails(ShapesReward):
    def score(self, clips, prompts, fps):
        raise OSError("no answer")


class Coarse(ShapesReward):
    """Tells good clips from others, but nothing about the clips of a model that is far from good."""

    names = ("style",)

    def score(self, clips, prompts, fps):
        return {"style": (super().score(clips, prompts, fps)["TA"] > 0.6).double()}


def test_a_reward_that_prefers_noise(run_doctor, monkeypatch):
    monkeypatch.setitem(REWARDS, "shapes", lambda setup: LovesNoise())
    words = (
        "VQ does not fall for noisy clips",
        "prefers wrong prompts",
        "check the sign of the reward",
    )
    expect_wrong(run_doctor, "reward", *words)


class Clean(ShapesReward):
    """Judges the picture alone, as aesthetic rewards do."""

    names = ("clean",)

    def score(self, clips, prompts, fps):
        return {"clean": super().score(clips, prompts, fps)["VQ"]}


def test_a_reward_that_ignores_the_prompt_is_noted_and_the_samplers_are_compared(
    run_doctor, monkeypatch
):
    monkeypatch.setitem(REWARDS, "shapes", lambda setup: Clean())
    assert run_doctor("--prompts", "2", "--clips", "2", eta=0.3) == 0
    marks = [(finding["mark"], finding["text"][:12]) for finding in run_doctor.findings("reward")]
    assert marks[:2] == [("ok", "no wrong rea"), ("note", "prompt-blind")]
    assert run_doctor.findings("samplers")
    notes = sum(finding["mark"] == "note" for finding in run_doctor.record["findings"])
    path = run_doctor.output / "doctor.json"
    assert run_doctor.text.endswith(f" All is well, with {notes} notes; the numbers are in {path}")


class Calm(ShapesReward):
    """Prefers clips in which nothing moves."""

    names = ("calm",)

    def score(self, clips, prompts, fps):
        return {"calm": torch.stack([-(clip / 255).diff(dim=0).abs().mean() for clip in clips])}


@pytest.mark.parametrize("reward, edit", [slow("motion", "noisy"), ("shapes", "frozen")])
def test_a_reward_that_pays_for_what_it_does_not_judge_is_noted_and_the_samplers_are_compared(
    run_doctor, monkeypatch, reward, edit
):
    """Slow: a reward that judges motion."""
    monkeypatch.setitem(REWARDS, "shapes", lambda setup: Calm())
    places = ("left", "right", "up", "down")
    lines = [f"a {color} circle moving {place}\n" for color in ("red", "blue") for place in places]
    run_doctor.train.write_text("".join(lines))
    assert run_doctor("--prompts", "2", "--clips", "2", eta=0.3, reward_model=reward) == 0
    notes = [finding["text"] for finding in run_doctor.findings("reward")[1:]]
    assert any(f"pays for {edit} clips" in text for text in notes)
    assert run_doctor.findings("samplers")


def test_weights_that_prefer_frozen_clips(run_doctor):
    expect_wrong(run_doctor, "reward", "prefers frozen clips", reward_weights='{"VQ": 1, "MQ": -1}')


def test_a_reward_that_is_constant(run_doctor, monkeypatch):
    monkeypatch.setattr(
        Coarse, "score", lambda self, clips, prompts, fps: {"style": torch.ones(len(clips))}
    )
    monkeypatch.setitem(REWARDS, "shapes", lambda setup: Coarse())
    expect_wrong(
        run_doctor,
        "reward",
        "constant: every clip gets the same total",
        reward_weights='{"style": 1}',
    )


def test_two_clips_are_too_few_to_call_a_reward_wrong(run_doctor, monkeypatch):
    """Its mean does not fall, but that could be chance."""
    run_doctor.train.write_text("".join(PROMPTS.splitlines(keepends=True)[:2]))
    monkeypatch.setitem(REWARDS, "shapes", lambda setup: LovesNoise())
    assert run_doctor("--skip_ab") == 0
    passed, unclear = run_doctor.findings("reward")
    assert (passed["mark"], unclear["mark"]) == ("ok", "note")
    assert unclear["text"].startswith("too few clips to tell (2): ")
    assert "VQ of noisy clips" in unclear["text"]


def test_a_reward_that_fails(run_doctor, monkeypatch):
    monkeypatch.setitem(REWARDS, "shapes", lambda setup: Fails())
    expect_wrong(
        run_doctor,
        "reward",
        "it fails on good clips: shapes: OSError: no answer",
        "repair the reward",
    )


def test_a_reward_that_teaches_nothing(run_doctor, monkeypatch):
    monkeypatch.setitem(REWARDS, "shapes", lambda setup: Coarse())
    flags = {"reward_weights": '{"style": 1}', "sde_type": "precise", "eta": 1.2}
    flags |= {"num_frames": 9, "height": 48, "width": 48}  # on fewer pixels good clips look worse
    expect_wrong(
        run_doctor, "samplers", "varies by 0 within a group", "equal rewards teach nothing", **flags
    )
    assert "cps is left out: eta is 1.2 with sde_type cps" in run_doctor.text


def test_a_vae_with_broken_weights(run_doctor):
    broken = run_doctor.folder / "model"
    shutil.copytree(TINY, broken)
    file = next((broken / "vae").glob("*.safetensors"))
    weights = {name: values.clone() for name, values in load_file(file).items()}
    weights[next(name for name in weights if name.startswith("decoder"))].fill_(torch.nan)
    save_file(weights, file)
    expect_wrong(run_doctor, "vae", "not finite", pretrained_model_root=broken)


def test_a_model_without_a_world(run_doctor, tiny_folder):
    """Its VAE was never trained, which the round trip must tell; no clip is known to be good."""
    flags = {"pretrained_model_root": tiny_folder, "reward_model": "shapes"}
    expect_wrong(
        run_doctor,
        "vae",
        "smooth synthetic clips",
        "download vae/ again",
        "no world that can draw",
        **flags,
    )


def test_a_sampler_that_is_no_ode_without_noise(run_doctor, monkeypatch):
    monkeypatch.setitem(
        SDES, "sage_grpo", euler_maruyama(lambda sigma, next, eta: (0.1 + eta**2) * (sigma - next))
    )
    expect_wrong(
        run_doctor,
        "noise 0",
        "sage_grpo at eta 0 and a plain Euler ODE",
        "the table of sage_grpo (algo/sde.py) must be a = 1",
    )


@pytest.mark.parametrize(
    "flags",
    [
        {"batch_size": 3},
        {"nonsense": 1},
        {"pretrained_model_root": "missing"},
        {"updates_per_rollout": 3},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_a_wrong_configuration_gets_the_sentence_of_the_trainer(run_doctor, capsys, flags):
    assert run_doctor(**flags) == 2
    assert not run_doctor.output.exists() and not (run_doctor.folder / "run").exists()
    assert post_train.main(run_doctor.arguments(**flags)) == 2
    sentence = capsys.readouterr().err.splitlines()[-1].removeprefix("post_train.py: ")
    assert run_doctor.errors.splitlines()[-1] == f"doctor: {sentence}"


def test_a_missing_prompt_file_is_found_with_the_machine(run_doctor, capsys):
    flags = {"train_prompts": "missing.txt"}
    assert run_doctor(**flags) == 2
    assert not run_doctor.output.exists()
    assert post_train.main(run_doctor.arguments(**flags)) == 2
    sentence = capsys.readouterr().err.splitlines()[-1].removeprefix("post_train.py: ")
    assert f"FAIL prompts {sentence}" in run_doctor.text


def test_its_own_flags(run_doctor, monkeypatch):
    assert run_doctor("--clips", "1") == 2 and "clips is 1" in run_doctor.errors
    assert run_doctor(output_dir=run_doctor.output) == 2
    assert "stays out of the run folder" in run_doctor.errors
    (run_doctor.folder / "file").touch()
    assert run_doctor("--output", f"{run_doctor.folder}/file/out") == 2
    assert "file/out" in run_doctor.errors
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_doctor() == 2 and "without torchrun" in run_doctor.errors


def test_a_recipe_is_examined_with_its_ranks_and_without_its_weights(run_doctor):
    """The machine comes first: what is missing here is said at once, and the weights are never looked for."""
    folder = run_doctor.folder / "none"
    paths = ["--pretrained_model_root", str(folder), "--output_dir", str(run_doctor.folder / "run")]
    code = doctor.main([*RECIPE, *paths])
    captured = run_doctor.capsys.readouterr()
    assert code == 2 and captured.err == ""
    assert f"FAIL  model   Model folder '{folder}' does not exist" in captured.out
    assert "keep_checkpoints + 1 need" in captured.out
    assert not (run_doctor.folder / "run-doctor").exists()


def test_defaults_come_from_the_configuration():
    options, config = doctor.parse_arguments([*RECIPE, "--output_dir", "some/run"])
    assert config.gpus == 8
    assert (options.ranks, options.ranks_here, str(options.output)) == (8, 1, "some/run-doctor")
    options, _ = doctor.parse_arguments([*RECIPE, "--short", "--ranks", "4"])
    assert (options.ranks, options.ranks_here) == (4, 4)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("sp_size", 3, "sp_size is 3; it must divide the number of processes, which is 8"),
        ("dp_replicate", 2, "dp_replicate is 2; that needs enable_fsdp True"),
        ("sp_size", 8, "sp_size is 8; it must divide the model's 6 heads"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_at_once(embedded_doctor, name, value, words):
    assert embedded_doctor("--ranks", "8", **{name: value}) == 2
    assert words in embedded_doctor.errors and not embedded_doctor.output.exists()


@pytest.mark.parametrize(
    "fixture, sp_size", [("run_doctor", 1), slow("embedded_doctor", 2)], ids=["dp8", "sp2"]
)
def test_a_sharded_run_is_checked_as_one_of_its_ranks(request, fixture, sp_size):
    """In one process, with the model sharded over it alone, and the batch of the whole layout. Slow: with sequences."""
    run_doctor = request.getfixturevalue(fixture)
    layout = {"enable_fsdp": True, "dp_replicate": 2, "sp_size": sp_size, "num_generations": 4}
    assert run_doctor("--skip_ab", "--ranks", "8", **layout) == 0
    (finding,) = run_doctor.findings("layout")
    assert finding["numbers"] == {"data": 8 // sp_size, "sequence": sp_size, "shards": 4}
    assert run_doctor.findings("batch")[0]["numbers"]["clips_per_iteration"] == 16 // sp_size
    assert run_doctor("--skip_ab", "--ranks", "3", **layout) == 2


def test_memory_that_a_gpu_does_not_have():
    flags = ["--pretrained_model_root", "none", "--enable_fsdp", "True", "--batch_size", "4"]
    plan = plan_of(parse(flags), 1)
    small, large = memory_result(plan, 80e9), memory_result(plan, 300e9)
    assert small.mark == "WRONG" and small.remedy == "--use_lora True"
    assert "the GPU has 80.0 GB" in small.text
    assert large.mark == "ok" and large.numbers["peak"] == small.numbers["peak"] > 80e9
