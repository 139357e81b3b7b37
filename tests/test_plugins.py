"""Code in a file runs only if the command line of this process names it; a stored configuration cannot make it run."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

import generate
import post_train
from research.studies.diagnosis_check import read_records, restore
from sage_grpo.config.parse import from_values
from sage_grpo.plugins import contained, is_trusted, resolved, trust
from sage_grpo.rewards.base import Setup
from sage_grpo.rewards.build import build_reward
from sage_grpo.tools import diagnose, evaluate
from sage_grpo.tools.doctor import __main__ as doctor
from sage_grpo.tools.plan import __main__ as plan
from sage_grpo.tools.report import __main__ as report
from sage_grpo.train.algorithms.grpo import Grpo
from tests.programs import exit_code
from tests.smallest_run import command_line
from tests.tools.fake_run import read_lines, write_lines

RECORDS = Path(__file__).parent / "fixtures" / "diagnosis.json.gz"
CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()

def step(sigma, sigma_next, eta):
    import torch
    return torch.ones_like(sigma), sigma_next - sigma, eta * sigma_next

def score(clips, prompts):
    return [float(clip.double().mean()) for clip in clips]
"""


@pytest.fixture
def code(tmp_path):
    file = tmp_path / "code.py"
    file.write_text(CODE)
    return file


def ran(code):
    return code.with_name("ran").exists()


@pytest.fixture
def foreign_run(tmp_path, code):
    """A run folder of somebody else, on a machine that the planner knows, whose configuration names code."""
    folder = restore(read_records(RECORDS)["small"]["healthy-1"], tmp_path / "run")
    lines = read_lines(folder)
    for line in lines:
        if line["kind"] == "run":
            line["device"] = "NVIDIA H200"
    write_lines(folder, lines)
    settings = [
        f"sde_type: {code}:step",
        f"reward_model: [{code}:score]",
        f"holdout_reward: {code}:score",
        f"pretrained_model_root: {tmp_path / 'absent'}",
    ]
    (folder / "config.yaml").write_text("\n".join(settings) + "\n")
    return folder


@pytest.mark.parametrize("program", [diagnose, report])
def test_reading_a_run_folder_does_not_run_its_code(undrawn, foreign_run, code, program):
    assert exit_code(program.main, [str(foreign_run)]) in (0, 1)
    assert not ran(code)


@pytest.mark.parametrize("program", [plan, doctor, evaluate, post_train])
def test_a_configuration_of_a_run_folder_does_not_run_its_code(
    foreign_run, code, program, tmp_path, capsys
):
    words = ["--config", str(foreign_run / "config.yaml")]
    if program in (doctor, evaluate):
        words += ["--output", str(tmp_path / "output")]
    assert exit_code(program.main, words) == 2
    assert f"{code}:step" in capsys.readouterr().err
    assert not ran(code)


def test_an_edited_file_runs_as_it_is_now(tmp_path, monkeypatch):
    """Bytecode beside a file counts while its size and the second of its change are the same, as after a quick edit."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "own.py"
    trust(f"{file}:value")
    for value in (1, 2):
        file.write_text(f"value = {value}\n")
        os.utime(file, (1e9, 1e9))
        assert resolved(f"{file}:value") == value


def test_values_do_not_make_code_trusted(code, tmp_path):
    config = from_values(
        {
            "sde_type": f"{code}:step",
            "reward_model": f"{code}:score",
            "num_sampling_steps": 3,
            "timestep_shift": 5.0,
        }
    )
    with pytest.raises(ValueError, match="name it on the command line"):
        Grpo(config).schedule()
    with pytest.raises(ValueError, match="name it on the command line"):
        build_reward(config.reward_model[0], Setup(tmp_path, "cpu"))
    assert not ran(code)


def test_each_name_is_trusted_by_itself(code):
    trust(f"{code}:step", "cps", None)
    assert is_trusted(f"{code}:step") and is_trusted("cps") and is_trusted(None)
    assert not is_trusted(f"{code}:score")
    assert callable(resolved(f"{code}:step"))


def test_a_varied_value_is_from_the_command_line(code, tmp_path, capsys):
    words = ["--pretrained_model_root", str(tmp_path / "absent")]
    words += ["--batch_size", "8", "--enable_fsdp", "True"]
    assert exit_code(plan.main, [*words, "--vary", "sde_type", "cps", f"{code}:step"]) == 0
    assert ran(code)


def test_a_run_with_a_plug_in_resumes_when_it_is_named_again(flags, code, tmp_path, capsys):
    values = flags | {"max_steps": 1, "save_interval": 1, "reward_model": f"{code}:score"}
    assert post_train.main(command_line(values)) == 0

    config = str(Path(values["output_dir"]) / "config.yaml")
    words = ["--config", config, "--max_steps", "2", "--resume_from_checkpoint", "auto"]
    assert post_train.main(words) == 2
    assert f"--reward_model {code}:score" in capsys.readouterr().err

    assert post_train.main([*words, "--reward_model", f"{code}:score"]) == 0
    status = json.loads((Path(values["output_dir"]) / "status.json").read_text())
    assert status["step"] == 2


FAULTS = {"exit": "sys.exit(0)", "interrupt": "raise KeyboardInterrupt", "bug": "1 / 0"}
FAULTY = """
import sys

class Check:
    names = ("a",)
    def check(self, prompts):
        {fault}
    def score(self, clips, prompts, fps):
        return {{"a": [0.0] * len(clips)}}

class Build:
    def __init__(self):
        {fault}

def score(clips, prompts):
    {fault}

def step(sigma, sigma_next, eta):
    {fault}
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_a_plug_in_raises_is_one_sentence(flags, tmp_path, capsys, fault):
    """Also an attempt to end the program, which would otherwise look like success."""
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY.format(fault=FAULTS[fault]))
    on_load = tmp_path / "on_load.py"
    on_load.write_text(f"import sys\n{FAULTS[fault]}")
    flags.pop("reward_model")
    rewards = [f"{file}:Check", f"{file}:Build", f"{on_load}:score"]
    commands = [["--reward_model", name, "--reward_weights", '{"a": 1}'] for name in rewards]
    commands.append(["--reward_model", "shapes", "--sde_type", f"{file}:step"])
    for words in commands:
        assert exit_code(post_train.main, command_line(flags) + words) == 2, words
        (line,) = capsys.readouterr().err.splitlines()
        assert words[-1] in line or words[1] in line or "Check" in line

    model = ["--model_path", flags["pretrained_model_root"], "--prompt", "a red circle"]
    model += ["--output_path", str(tmp_path / "clips")]
    commands = [["--score", name] for name in (*rewards, f"{file}:score")]
    commands.append(["--sde_type", f"{file}:step"])
    for words in commands:
        assert exit_code(generate.main, model + words) == 2, words
        assert "Traceback" not in capsys.readouterr().err
    assert not Path(flags["output_dir"]).exists()


def test_ctrl_c_interrupts_a_plug_in():
    with pytest.raises(KeyboardInterrupt), contained("it failed"):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ValueError, match="it failed: KeyboardInterrupt"), contained("it failed"):
        raise KeyboardInterrupt
