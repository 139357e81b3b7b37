"""Checks before a node trains: a line for each, ok or FAIL, and no run after a FAIL."""

import socket
import subprocess
import sys
import time

import pytest

from tests.launch.shell import ROOT, TRAIN, environment, launch, program

TINY = {"CONFIG": "configs/tiny_cpu.yaml"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def smi(tmp_path, *megabytes):
    """nvidia-smi of a machine with GPUs that have this much in use."""
    return program(
        tmp_path / "bin", "nvidia-smi", f"printf '%s\\n' {' '.join(map(str, megabytes))}"
    )


@pytest.mark.slow
def test_a_sound_node_passes(tmp_path):
    """Slow: a process of its own; tests/tools/doctor/test_machine.py runs the checks of a sound machine."""
    path = smi(tmp_path, 3, 900, 50000)
    settings = TINY | {
        "NUM_GPUS": 2,
        "PATH": path,
        "OUTPUT_DIR": tmp_path / "new" / "run",
        "MASTER_PORT": free_port(),
    }
    result = launch(TRAIN, "--check", "--device", "cpu", **settings)
    found = [line.split(maxsplit=2)[:2] for line in result.stdout.splitlines()]
    names = (
        "source",
        "idle",
        "port",
        "model",
        "prompts",
        "gpus",
        "host",
        "disk",
        "speed",
        "reward",
    )
    assert found == [["ok", name] for name in names], result.stdout + result.stderr
    assert result.returncode == 0 and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_every_failed_check_is_a_line(tmp_path):
    """Slow: all checks fail at once; those of a sound node are run in `make test`."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = TINY | {
            "NNODES": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "NUM_GPUS": 4, "MODEL_ROOT": "gone",
            "PATH": smi(tmp_path, 3, 2500), "LAUNCH_COMMIT": "f" * 40, "LAUNCH_CONFIG": "other",
            "OUTPUT_DIR": tmp_path / "run", "BATCH_SIZE": 8,
        }  # fmt: skip
        flags = ("--keep_checkpoints", 10**9, "--save_minutes", 1e-9, "--enable_fsdp")
        result = launch(TRAIN, "--check", *flags, **settings)
    assert result.returncode == 2
    expected = {
        "source": ["the commit is ", "configs/tiny_cpu.yaml is not the file of the launching machine; copy it"],
        "idle": ["2 GPUs are here, NUM_GPUS is 4; lower it",
                 "GPU 1 has 2500 MB in use; end what uses it, or raise MAX_USED_GPU_MB=1000"],
        "port": [f"MASTER_PORT {port} is not free"],
        "model": ["Model folder 'gone' does not exist; download_weights.sh makes one"],
        "gpus": ["NVIDIA driver "],
        "disk": ["GB free; keep_checkpoints + 1 need "],
        "speed": [" s for a checkpoint, one every 0 s; use a faster disk, or raise save_interval and save_minutes"],
        "reward": ["the reward folder gone/VideoReward does not exist; name it with --reward_path"],
    }  # fmt: skip
    lines = [line.split(maxsplit=2) for line in result.stdout.splitlines()]
    failed = [
        (name, text)
        for mark, name, text in lines
        if mark == "FAIL" and name not in ("host", "memory")
    ]
    wanted = [(name, words) for name, several in expected.items() for words in several]
    assert [name for name, _ in failed] == [name for name, _ in wanted], (
        result.stdout + result.stderr
    )
    for (_, text), (_, words) in zip(failed, wanted, strict=True):
        assert words in text


def doctorless(tmp_path):
    """A Python whose doctor ends with DOCTOR, or 0, and leaves its words behind; torchrun only says that it is done."""
    ours = f'printf "%s\\0" "$@" >{tmp_path}/doctor; exit ${{DOCTOR:-0}}'
    done = f'touch {tmp_path}/trained; echo \'{{"state": "done"}}\' >{tmp_path}/run/status.json; exit 0'
    text = f"case $2 in sage_grpo.tools.doctor) {ours} ;; torch.*) {done} ;; esac"
    program(tmp_path, "python", f'{text}\nexec {sys.executable} "$@"')
    return tmp_path / "python"


@pytest.mark.parametrize(
    "words, settings, sentence",
    [
        (["--sp_siz", "2"], {}, "post_train.py: unknown flag --sp_siz; did you mean --sp_size?"),
        (
            [],
            {"LAUNCH_CHANGES": "another"},
            "uncommitted changes differ from those of the launching machine",
        ),
        (
            [],
            {"PYTHON": "/nowhere/python"},
            "/nowhere/python cannot read the flags; PYTHON must name one with",
        ),
        ([], {"DOCTOR": 2}, ""),
    ],
)
def test_one_thing_wrong_is_enough(tmp_path, words, settings, sentence):
    settings = (
        TINY | {"NUM_GPUS": 2, "PYTHON": doctorless(tmp_path), "OUTPUT_DIR": tmp_path} | settings
    )
    result = launch(TRAIN, "--check", *words, PATH=smi(tmp_path, 0, 0), **settings)
    assert result.returncode == 2 and sentence in result.stdout + result.stderr
    assert result.stdout.count("FAIL") == ("LAUNCH_CHANGES" in settings)


def test_a_run_on_one_machine_begins_with_the_checks(tmp_path):
    """`run_post_train.sh` itself: the checks come first, a dry run and SKIP_CHECKS=1 leave them out."""
    settings = TINY | {
        "NUM_GPUS": 2,
        "PYTHON": doctorless(tmp_path),
        "OUTPUT_DIR": tmp_path / "run",
    }
    settings |= {"PATH": smi(tmp_path, 0, 0)}
    doctor, trained = tmp_path / "doctor", tmp_path / "trained"
    assert (
        launch("run_post_train.sh", "--dry_run", **settings).returncode == 0 and not doctor.exists()
    )
    refused = launch("run_post_train.sh", "--seed", "5", **settings, DOCTOR=2)
    assert refused.returncode == 2 and not trained.exists() and not (tmp_path / "run").exists()
    sentence = "localhost is not ready, nothing was started; SKIP_CHECKS=1 leaves the checks out"
    assert refused.stderr == f"train_grpo.sh: {sentence}\n" and refused.stdout.startswith(
        "ok    source  commit "
    )
    words = doctor.read_text().split("\0")
    assert words[:7] == [
        "-m",
        "sage_grpo.tools.doctor",
        "--short",
        "--ranks",
        "2",
        "--ranks_here",
        "2",
    ]
    assert words[-3:] == ["--seed", "5", ""] and str(tmp_path / "run") in words
    doctor.unlink()
    assert launch("run_post_train.sh", **settings, DOCTOR=2, SKIP_CHECKS=1).returncode == 0
    assert trained.exists() and not doctor.exists()
    trained.unlink()
    assert (
        launch("run_post_train.sh", **settings).returncode == 0
        and trained.exists()
        and doctor.exists()
    )


def test_checks_can_be_stopped(tmp_path):
    wait = f"touch {tmp_path}/waits; while :; do sleep 0.1; done"
    program(
        tmp_path,
        "python",
        f'[[ $2 != sage_grpo.tools.doctor ]] || {{ {wait}; }}; exec {sys.executable} "$@"',
    )
    settings = TINY | {"NUM_GPUS": 1, "PYTHON": tmp_path / "python", "OUTPUT_DIR": tmp_path / "run"}
    command = ["bash", str(ROOT / "run_post_train.sh")]
    for stop in (
        lambda script: script.terminate(),
        lambda script: launch(TRAIN, "--stop", **settings),
    ):
        with subprocess.Popen(
            command, env=environment(**settings), stdout=subprocess.DEVNULL
        ) as script:
            while not (tmp_path / "waits").exists():
                assert script.poll() is None
                time.sleep(0.05)
            stop(script)
            assert script.wait(60) == 75 and not (tmp_path / "run").exists()
        (tmp_path / "waits").unlink()


def probe(*words):
    command = [
        environment()["PYTHON"],
        str(ROOT / "scripts/post_train/rendezvous_probe.py"),
        *map(str, words),
    ]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_nodes_meet_at_the_rendezvous():
    port = free_port()
    probes = [
        probe("listen", "localhost", port, 2, 20),
        *(probe("call", "localhost", port, 2, 20) for _ in range(2)),
    ]
    assert [(each.communicate()[1], each.returncode) for each in probes] == [("", 0)] * 3


def test_nodes_that_do_not_meet_say_so():
    port = free_port()
    waiting, calling = (
        probe("listen", "here", port, 2, 1),
        probe("call", "localhost", free_port(), 2, 1),
    )
    assert "2 of 2 other nodes have not reached here:" in waiting.communicate()[1]
    assert (
        "cannot be reached (Connection refused); check name and firewall"
        in calling.communicate()[1]
    )
