"""Checks of a node before training: one line per failure, and none if all pass."""

import socket
import subprocess

import pytest

from tests.launch.shell import ROOT, TRAIN, environment, launch, program

FREE = {"MIN_FREE_GB": 0, "CONFIG": "configs/tiny_cpu.yaml"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def smi(tmp_path, *megabytes):
    """nvidia-smi of a machine with GPUs that have this much in use."""
    return program(tmp_path / "bin", "nvidia-smi", f"printf '%s\\n' {' '.join(map(str, megabytes))}")


def test_a_sound_node_passes(tmp_path):
    path = smi(tmp_path, 3, 900, 50000)
    result = launch(TRAIN, "--check", NUM_GPUS=2, PATH=path, OUTPUT_DIR=tmp_path / "new" / "run", **FREE)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert not (tmp_path / "new").exists()


def test_every_failed_check_is_a_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = {
            "NNODES": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "NUM_GPUS": 4, "MODEL_ROOT": "gone",
            "PATH": smi(tmp_path, 3, 2500), "LAUNCH_COMMIT": "f" * 40, "LAUNCH_CONFIG": "other", "MIN_FREE_GB": 10**9,
            "CONFIG": FREE["CONFIG"], "OUTPUT_DIR": tmp_path / "run",
        }  # fmt: skip
        result = launch(TRAIN, "--check", **settings)
    assert result.returncode == 1
    expected = [
        "the commit is ", "configs/tiny_cpu.yaml is not the file of the launching machine; copy it",
        "pretrained_model_root gone does not exist", "2 GPUs are here, NUM_GPUS is 4",
        "GPU 1 has 2500 MB in use; end what uses it, or raise MAX_USED_GPU_MB=1000",
        "GB of room; make some, or lower MIN_FREE_GB=1000000000", f"MASTER_PORT {port} is not free",
    ]  # fmt: skip
    lines = result.stdout.splitlines()
    assert len(lines) == len(expected)
    for line, words in zip(lines, expected, strict=True):
        assert line.startswith("check failed: ") and words in line


@pytest.mark.parametrize(
    "words, settings, sentence",
    [
        (["--sp_siz", "2"], {}, "cannot read the flags: post_train.py: unknown flag --sp_siz"),
        ([], {"LAUNCH_CHANGES": "another"}, "uncommitted changes differ from those of the launching machine"),
        ([], {"PYTHON": "/nowhere/python"}, "/nowhere/python cannot read the flags"),
    ],
)
def test_one_thing_wrong_is_one_line(tmp_path, words, settings, sentence):
    path = smi(tmp_path, 0, 0)
    result = launch(TRAIN, "--check", *words, NUM_GPUS=2, PATH=path, OUTPUT_DIR=tmp_path, **FREE, **settings)
    assert result.returncode == 1 and len(result.stdout.splitlines()) == 1 and sentence in result.stdout


def probe(*words):
    command = [environment()["PYTHON"], str(ROOT / "scripts/post_train/rendezvous_probe.py"), *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_nodes_meet_at_the_rendezvous():
    port = free_port()
    probes = [probe("listen", "localhost", port, 2, 20), *(probe("call", "localhost", port, 2, 20) for _ in range(2))]
    assert [(each.communicate()[1], each.returncode) for each in probes] == [("", 0)] * 3


def test_nodes_that_do_not_meet_say_so():
    port = free_port()
    waiting, calling = probe("listen", "here", port, 2, 1), probe("call", "localhost", free_port(), 2, 1)
    assert "2 of 2 other nodes have not reached here:" in waiting.communicate()[1]
    assert "cannot be reached (Connection refused); check name and firewall" in calling.communicate()[1]
