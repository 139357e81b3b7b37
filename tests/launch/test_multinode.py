"""Two hosts train exactly as one does, and either can die midway. The hosts are namespaces; everything else is real."""

import subprocess
import time
from contextlib import contextmanager

import pytest

from sage_grpo.config.parse import parse
from sage_grpo.train.build import build_trainer
from tests.dist import run_ranks
from tests.launch import hosts
from tests.launch.shell import ROOT, environment

STEPS = 6
PATIENCE = 400  # seconds, on a busy machine; a loss alone takes 20 on a quiet one
WHY_NOT = hosts.missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture
def settings(program_folder, tmp_path):
    prompts, config = tmp_path / "prompts.txt", tmp_path / "config.yaml"
    prompts.write_text("a red circle moving left\na green square moving right\n")
    flags = {
        "pretrained_model_root": program_folder, "train_prompts": [str(prompts)], "validation_prompts": [str(prompts)],
        "reward_model": "shapes", "batch_size": 2, "num_generations": 2, "num_sampling_steps": 2, "num_frames": 5,
        "height": 16, "width": 16,
        "guidance_scale": 1.0, "max_steps": STEPS, "save_interval": 1, "keep_checkpoints": STEPS, "report_to": "none",
        "validation_interval": 0, "validation_num_inference_steps": 1, "learning_rate": 1e-3,
        "validate_video_length": 5, "validation_fixed_size": "16x16",
        "collective_timeout": 60, "start_timeout": 60,
    }  # fmt: skip
    config.write_text("".join(f"{name}: {value}\n" for name, value in flags.items()))
    return {"CONFIG": config, "MAX_RESTARTS": 2, "STOP_GRACE": 20, "SKIP_CHECKS": 1}


def train(ranks, config, output):
    build_trainer(parse(["--config", str(config), "--output_dir", str(output)]), ranks).train()


def weights(run):
    folder = run / "checkpoints" / f"step-{STEPS:06d}"
    return {
        str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.safetensors")
    }


def wait_for(step, run, process):
    """Until that iteration is saved, while the launcher still runs."""
    end = time.monotonic() + PATIENCE
    while not (run / "checkpoints" / f"step-{step:06d}").is_dir():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)


@contextmanager
def launched(settings, said):
    """The launcher of the two hosts, ended at the latest here; what it says is added to a file."""
    command = ["bash", str(ROOT / "run_post_train_multinode.sh")]
    with said.open("a") as out:
        launcher = subprocess.Popen(
            command, env=environment(**settings), stdout=out, stderr=subprocess.STDOUT
        )
        try:
            yield launcher
        finally:
            launcher.terminate()
            launcher.wait(PATIENCE)


@pytest.mark.slow
def test_a_run_survives_the_loss_of_each_host(settings, tmp_path):
    """Slow: real hosts and real training; what the launcher does about a lost node is tested in test_pdsh.py."""
    one, two, said = tmp_path / "one", tmp_path / "two", tmp_path / "said"
    run_ranks(2, train, settings["CONFIG"], one)  # on one host, without a stop
    with hosts.two_hosts() as (first, second):
        settings |= {
            "NODES": f"{first},{second}", "NUM_GPUS": 1, "OUTPUT_DIR": two, "JOIN_TIMEOUT": 60,
            "PDSH_RCMD_TYPE": "exec", "REMOTE_SHELL": "ip netns exec %h", "GLOO_SOCKET_IFNAME": hosts.INTERFACE,
            "RDZV_CONF": "keep_alive_interval=1,keep_alive_max_attempt=2",
        }  # fmt: skip
        with launched(settings, said) as launcher:
            wait_for(1, two, launcher)
            assert hosts.kill_all(second) > 3  # shell, launcher, torchrun, worker
            wait_for(3, two, launcher)
            assert hosts.kill_all(first) > 3
            assert launcher.wait(PATIENCE) == 0, said.read_text()[-3000:]
    text = said.read_text()
    assert f"{second} was lost and is started again (loss 1 of 3)" in text
    assert (
        f"{first} was lost, and the rendezvous with it: all nodes are started again (loss 2 of 3)"
        in text
    )
    assert weights(two) == weights(one) and len(weights(one)) == 2
