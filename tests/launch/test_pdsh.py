"""pdsh_train.sh with small scripts in place of training: who failed, what is restarted, what reaches the nodes."""

import shutil
import signal
import subprocess
import time

import pytest

from tests.launch.shell import PDSH, ROOT, environment, launch, program

pytestmark = pytest.mark.skipif(not shutil.which("pdsh"), reason="install pdsh")
LOST = (
    "kill -KILL $PPID $$"  # the shell that runs the script, and the script: no exit code comes back
)


@pytest.fixture
def nodes(tmp_path):
    """Settings and a script, `alpha` and `beta` in it being what each node does; both are this machine."""

    def build(alpha, beta, **settings):
        script = tmp_path / "script.sh"
        script.write_text(f"""
            for word in "$@"; do
                case $word in --check) exit 0 ;; --stop | --kill) touch {tmp_path}/$NODE_NAME$word; exit 0 ;; esac
            done
            echo x >>{tmp_path}/$NODE_NAME.starts
            starts=$(wc -l <{tmp_path}/$NODE_NAME.starts)
            case $NODE_NAME in alpha) {alpha} ;; beta) {beta} ;; esac
        """)
        settings = {"NODES": "alpha,beta", "PDSH_RCMD_TYPE": "exec", "REMOTE_SHELL": "env", "FAIL_GRACE": 1,
                    "OUTPUT_DIR": tmp_path / "run", "SKIP_CHECKS": 1} | settings  # fmt: skip
        return script, settings

    return build


def starts(tmp_path):
    return [len((tmp_path / f"{name}.starts").read_text().split()) for name in ("alpha", "beta")]


@pytest.mark.parametrize(
    "alpha, beta, code",
    [("exit 0", "exit 0", 0), ("exit 75", "exit 75", 75), ("exit 0", "exit 75", 75), ("exit 75", "exit 1", 1),
     ("exit 3", "exit 1", 3)],
)  # fmt: skip
def test_the_exit_code_is_that_of_the_worst_node(nodes, tmp_path, alpha, beta, code):
    script, settings = nodes(alpha, beta)
    result = launch(PDSH, script, **settings)
    assert result.returncode == code, result.stdout + result.stderr
    assert ("failed with" in result.stderr) == (code not in (0, 75)) and starts(tmp_path) == [1, 1]


def test_a_failure_names_its_node_its_last_lines_and_its_log(nodes, tmp_path):
    script, settings = nodes(
        f"until [ -e {tmp_path}/alpha--kill ]; do sleep 0.1; done; exit 1", "echo disaster; exit 1"
    )
    result = launch(PDSH, script, **settings)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-3:] == [
        "pdsh_train.sh: beta failed with exit code 1, after these lines:",
        "beta: disaster",
        f"pdsh_train.sh: the log of beta is {tmp_path}/run/logs/beta.log",
    ]


def test_a_lost_node_is_cleared_and_started_again(nodes, tmp_path):
    wait = f"until [ -e {tmp_path}/beta.done ]; do sleep 0.1; done"
    script, settings = nodes(wait, f"[ $starts = 2 ] || {LOST}; touch {tmp_path}/beta.done")
    result = launch(PDSH, script, **settings)
    assert (
        result.returncode == 0
        and "beta was lost and is started again (loss 1 of 3)" in result.stdout
    )
    assert (
        starts(tmp_path) == [1, 2]
        and (tmp_path / "beta--kill").exists()
        and not (tmp_path / "alpha--kill").exists()
    )


def test_losing_the_first_node_starts_all_again_even_if_others_failed_before(nodes, tmp_path):
    alpha = f"[ $starts = 2 ] || {{ until [ -e {tmp_path}/beta.failed ]; do sleep 0.1; done; sleep 2; {LOST}; }}"
    script, settings = nodes(
        alpha, f"[ $starts = 2 ] || {{ touch {tmp_path}/beta.failed; exit 1; }}"
    )
    result = launch(PDSH, script, **settings | {"FAIL_GRACE": 20})
    assert result.returncode == 0, result.stderr
    assert (
        "alpha was lost, and the rendezvous with it: all nodes are started again (loss 1 of 3)"
        in result.stdout
    )
    assert starts(tmp_path) == [2, 2]


def test_losses_are_counted(nodes, tmp_path):
    script, settings = nodes(
        f"until [ -e {tmp_path}/alpha--kill ]; do sleep 0.1; done; exit 1", LOST
    )
    result = launch(PDSH, script, **settings | {"NODE_RESTARTS": 1})
    assert result.returncode == 255 and starts(tmp_path) == [1, 2]
    assert "pdsh_train.sh: beta was lost, after these lines:\n" in result.stderr
    assert "\nbeta: no answer through exec\n" in result.stderr


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_nodes(nodes, tmp_path, sign):
    both = f"until [ -e {tmp_path}/$NODE_NAME--stop ]; do sleep 0.1; done; exit 75"
    script, settings = nodes(both, both)
    command = ["bash", str(ROOT / PDSH), str(script)]
    launcher = subprocess.Popen(
        command, env=environment(**settings), stdout=subprocess.PIPE, text=True
    )
    while not ((tmp_path / "alpha.starts").exists() and (tmp_path / "beta.starts").exists()):
        time.sleep(0.05)
    launcher.send_signal(sign)
    assert launcher.wait(60) == 75 and starts(tmp_path) == [1, 1]
    launcher.stdout.close()


def test_a_signal_ends_the_wait_for_a_lost_node(nodes, tmp_path):
    """The node is gone for good: the wall that REMOTE_SHELL runs into is a file of this test."""
    wall = program(
        tmp_path / "bin",
        "reach",
        f'[[ $1 == alpha || ! -e {tmp_path}/wall ]] && shift && exec "$@"; exit 255',
    )
    alpha = f"until [ -e {tmp_path}/alpha--stop ]; do sleep 0.1; done; exit 75"
    script, settings = nodes(
        alpha, f"touch {tmp_path}/wall; {LOST}", REMOTE_SHELL="reach %h", PATH=wall
    )
    command = ["bash", str(ROOT / PDSH), str(script)]
    launcher = subprocess.Popen(
        command, env=environment(**settings), stdout=subprocess.PIPE, text=True
    )
    assert any("beta was lost and is started again" in line for line in launcher.stdout)
    launcher.terminate()
    assert launcher.wait(60) == 75 and starts(tmp_path) == [1, 1]
    launcher.stdout.close()


AWKWARD = "a cat, \"two\" 'dogs' $HOME `x` 100% %h \\ * \n ; é"
ELSEWHERE = "env -u NCCL_X -u SEED -u SAGE_REWARD_TOKEN"  # a node does not have the variables of this machine


@pytest.mark.parametrize("how", ["exec", "ssh"])
def test_words_and_variables_arrive_as_they_were(nodes, tmp_path, how):
    """By ssh they pass through one more shell; a small program stands for ssh and hands them on as sshd does."""
    words = '"$@" $NODE_RANK "$NCCL_X" "$SEED" "${SAGE_REWARD_TOKEN-none}"'
    save = f'printf "%s\\0" {words} >{tmp_path}/$NODE_NAME.words'
    script, settings = nodes(save, save, PDSH_RCMD_TYPE=how, REMOTE_SHELL=ELSEWHERE)
    ssh = f'until [[ $1 != -* ]]; do shift; done; shift; exec {ELSEWHERE} sh -c "$*"'
    settings |= {"PATH": program(tmp_path / "bin", "ssh", ssh)}
    settings |= {"NCCL_X": "1 2", "SEED": 5, "SAGE_REWARD_TOKEN": "hush"}
    result = launch(PDSH, script, "--negative_prompt", AWKWARD, **settings)
    assert result.returncode == 0, result.stderr
    for rank, name in enumerate(("alpha", "beta")):
        words = (tmp_path / f"{name}.words").read_text().split("\0")
        assert words == ["--negative_prompt", AWKWARD, str(rank), "1 2", "5", "none", ""]


def test_nothing_starts_when_a_node_is_not_ready(tmp_path):
    script = tmp_path / "script.sh"
    script.write_text(f"""
        echo "$@" >>{tmp_path}/calls
        echo "ok    source  commit 1"
        [ $NODE_NAME = alpha ] || {{ echo "FAIL  gpus    there is none"; exit 2; }}
    """)
    settings = {"NODES": "alpha,beta", "PDSH_RCMD_TYPE": "exec", "REMOTE_SHELL": "env"}
    result = launch(PDSH, script, **settings)
    assert result.returncode == 2 and (tmp_path / "calls").read_text() == "--check\n--check\n"
    lines = [line for line in result.stderr.splitlines() if not line.startswith("note:")]
    assert lines == [
        "beta: FAIL  gpus    there is none",
        "pdsh_train.sh: 1 of 2 nodes are not ready, nothing was started; SKIP_CHECKS=1 leaves the checks out",
    ]
