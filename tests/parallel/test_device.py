"""No run on a CPU unless it was asked for or the model is small; the refusal says what is wrong with the GPU."""

import json
import shutil

import pytest
import torch

import generate
import post_train
from sage_grpo.parallel import device
from sage_grpo.parallel.ranks import join_ranks
from sage_grpo.tools import evaluate
from sage_grpo.tools.doctor import __main__ as doctor
from tests.programs import exit_code

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: gcc 11.4.0\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version: 12.3\n"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def large(tiny_folder, tmp_path):
    """A model folder of more than 100 M parameters, if one believes its configuration; that is all there is to read."""
    folder = tmp_path / "large"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "transformer" / "config.json").read_text())
    (folder / "transformer" / "config.json").write_text(
        json.dumps(config | {"num_attention_heads": 256})
    )
    return folder


def sentence(capsys):
    (line,) = capsys.readouterr().err.splitlines()
    assert "no GPU can be used: " in line and "give --device cpu" in line
    assert "NVIDIA driver " in line
    assert f"torch {torch.__version__} for CUDA {torch.version.cuda or 'none'}" in line
    return line


def test_training_a_large_model_on_a_cpu_is_refused(large, tmp_path, capsys):
    flags = ["--pretrained_model_root", str(large), "--output_dir", str(tmp_path / "run")]
    assert post_train.main(flags) == 2 and sentence(capsys).startswith("post_train.py: ")
    assert not (tmp_path / "run").exists()
    # refused for another reason: the weights are not those of the configuration
    assert post_train.main([*flags, "--device", "cpu"]) == 2
    assert "no GPU" not in capsys.readouterr().err


def test_so_are_sampling_and_the_tools(large, tiny_folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        generate.main(
            ["--model_path", str(large), "--prompt", "a red circle", "--output_path", str(tmp_path)]
        )
    assert stop.value.code == 2 and sentence(capsys).startswith("generate.py: ")
    flags = ["--pretrained_model_root", str(large), "--output", str(tmp_path / "out")]
    assert exit_code(doctor.main, flags) == 2 and sentence(capsys).startswith("doctor: ")
    for words in ([], ["--checkpoints", str(tiny_folder)]):
        assert exit_code(evaluate.main, [*flags, *words]) == 2
        assert sentence(capsys).startswith("evaluate: ")


def test_a_gpu_that_was_asked_for_must_be_there(tiny_folder, tmp_path, capsys):
    flags = ["--pretrained_model_root", str(tiny_folder), "--output_dir", str(tmp_path / "run")]
    assert post_train.main([*flags, "--device", "cuda"]) == 2 and sentence(capsys)
    with pytest.raises(ValueError, match="no GPU can be used"), join_ranks(1.0, device_type="cuda"):
        pass


def test_a_small_model_and_whoever_asks_get_the_cpu():
    assert device.choose_device("auto", lambda: device.SMALL) == "cpu"
    assert device.choose_device("cpu", lambda: 10**10) == "cpu"
    with pytest.raises(ValueError, match="no GPU can be used"):
        device.choose_device("auto", lambda: device.SMALL + 1)


def test_a_gpu_is_used_unless_the_cpu_was_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = [device.choose_device(wanted, lambda: 10**10) for wanted in ("auto", "cuda", "cpu")]
    assert chosen == ["cuda", "cuda", "cpu"]


@pytest.mark.parametrize(
    "text, version", [(OPEN, "580.65.06"), (CLOSED, "535.183.01"), (None, "none")]
)
def test_the_driver_is_the_one_that_the_kernel_runs(monkeypatch, tmp_path, text, version):
    monkeypatch.setattr(device, "DRIVER", tmp_path / "version")
    if text:
        device.DRIVER.write_text(text)
    assert device.versions().startswith(f"NVIDIA driver {version}, torch ")


OLD = "The NVIDIA driver on your system is too old (found version 12080). Please update your GPU driver by downloading"


@pytest.mark.parametrize(
    "visible, message, reason",
    [
        (None, OLD, "The NVIDIA driver on your system is too old (found version 12080)"),
        ("", "No CUDA GPUs are available", "CUDA_VISIBLE_DEVICES is ''"),
        ("-1", "No CUDA GPUs are available", "CUDA_VISIBLE_DEVICES is '-1'"),
        ("0,1", "No CUDA GPUs are available", "No CUDA GPUs are available"),
        ("GPU-5f", None, "torch counts none"),
    ],
)
def test_the_reason_is_torchs_own(monkeypatch, visible, message, reason):
    """As a torch for CUDA 13.0 words it."""

    def init():
        if message:
            raise RuntimeError(message)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device.why_no_gpu() == reason


def test_a_torch_without_cuda_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert device.why_no_gpu() == "this torch is built without CUDA"
    assert device.versions().endswith(" for CUDA none")
