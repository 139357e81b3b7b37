"""train_grpo.sh and slurm.sh with a small program in place of torchrun: exit codes, signals, what is left behind."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.shell import ROOT, TRAIN, environment, launch, program

TORCHRUN = f"""
if [[ $1 == post_train.py || $1 == -c ]]; then exec {sys.executable} "$@"; fi
status() {{ echo "{{\\"state\\": \\"$1\\"}}" >"$OUT/status.tmp" && mv "$OUT/status.tmp" "$OUT/status.json"; }}
export -f status
case $DO in
    wait)
        trap 'status preempted; exit 1' TERM
        touch "$OUT/ready.$SLURM_NODEID"
        while :; do sleep 0.1; done
        ;;
    late)  # another node writes how it went, a moment later
        status running
        env -u SAGE_LAUNCH bash -c 'touch "$OUT/away"; sleep 1; status preempted' &
        until [[ -e $OUT/away ]]; do sleep 0.05; done
        exit 1
        ;;
    orphan)
        setsid sleep 1000 &
        echo $! >"$OUT/orphan"
        kill -KILL $$
        ;;
    *) eval "$DO" ;;
esac
"""
SRUN = """
shift 2
for i in 0 1; do SLURM_NODEID=$i SLURMD_NODENAME=n$i "$@" & done
trap 'kill -TERM $(jobs -p)' TERM
for job in $(jobs -p); do
    while code=0; wait $job || code=$?; ((code > 128)); do :; done  # a signal ends the wait
done
exit $code
"""


@pytest.fixture
def settings(tmp_path):
    """A Python that is TORCHRUN; DO says what that does."""
    (tmp_path / "run").mkdir()
    program(tmp_path, "python", TORCHRUN)
    return {"PYTHON": tmp_path / "python", "OUT": tmp_path / "run", "OUTPUT_DIR": tmp_path / "run", "NUM_GPUS": 1,
            "SKIP_CHECKS": 1}  # fmt: skip


@pytest.mark.parametrize(
    "before, act, code",
    [
        (None, "status done; exit 0", 0),
        (None, "exit 0", 1),  # a reward that calls os._exit(0)
        (None, "status running; exit 0", 1),
        ("done", "exit 0", 1),
        (None, "exit 1", 1),
        (None, "status failed; exit 1", 1),
        (None, "status preempted; exit 1", 75),
        (None, "status done; exit 1", 0),
        ("done", "exit 1", 1),
        ("preempted", "exit 1", 1),
        ("preempted", "status failed; exit 1", 1),
        (None, "late", 75),
        (None, "status running; kill -KILL $$", 137),
    ],
)
def test_the_exit_code_tells_how_the_run_went(settings, tmp_path, before, act, code):
    if before:
        (tmp_path / "run" / "status.json").write_text(f'{{"state": "{before}"}}')
    result = launch(TRAIN, DO=act, **settings)
    assert result.returncode == code, result.stdout + result.stderr
    assert (
        f"localhost ends with exit code {code}"
        in (tmp_path / "run" / "logs" / "localhost.log").read_text()
    )


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_torchrun(settings, tmp_path, sign):
    with started(settings, tmp_path) as script:
        script.send_signal(sign)
        assert (
            script.wait(30) == 75 and "preempted" in (tmp_path / "run" / "status.json").read_text()
        )


def started(settings, tmp_path):
    command = ["bash", str(ROOT / TRAIN)]
    script = subprocess.Popen(
        command, env=environment(DO="wait", **settings), stdout=subprocess.DEVNULL
    )
    wait_for(tmp_path / "run" / "ready.")
    return script


def wait_for(file):
    end = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_second_start_is_refused_and_stop_ends_the_first(settings, tmp_path):
    with started(settings, tmp_path) as script:
        refused = launch(TRAIN, DO="exit 0", **settings)
        assert refused.returncode == 2 and "localhost already trains into" in refused.stderr
        assert launch(TRAIN, "--stop", **settings).returncode == 0
        assert script.wait(30) == 75


@pytest.fixture
def bystander():
    """A process of somebody else, known by one variable."""
    with subprocess.Popen(["sleep", "1000"], env=environment(BYSTANDER="here")) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("switch", ["--stop", "--kill"])
@pytest.mark.parametrize("how", ["file", "variable", "link", "node"])
def test_a_run_folder_cannot_name_processes_of_others(settings, tmp_path, bystander, switch, how):
    hostile, place = f"{tmp_path}/x\nBYSTANDER=here", {}
    if how == "file":
        (tmp_path / "c.yaml").write_text(f"output_dir: {tmp_path}/x\noutput_dir: BYSTANDER=here\n")
        (tmp_path / "d.yaml").write_text(f'output_dir: "{tmp_path}/x\\nBYSTANDER=here"\n')
        place = {"CONFIG": tmp_path / "c.yaml"}
        assert launch(
            TRAIN,
            switch,
            DO="exit 0",
            **settings | {"OUTPUT_DIR": "", "CONFIG": tmp_path / "d.yaml"},
        ).stderr
    elif how == "variable":
        place = {"CONFIG": "configs/tiny_cpu.yaml", "OUTPUT_DIR": hostile}
    elif how == "link":
        (tmp_path / "link").symlink_to(hostile)
        place = {"OUTPUT_DIR": tmp_path / "link"}
    else:
        place = {"NODE_NAME": "x\nBYSTANDER=here\nx"}
    result = launch(TRAIN, switch, DO="exit 0", **settings | {"OUTPUT_DIR": ""} | place)
    assert bystander.poll() is None
    assert how == "file" or (result.returncode == 2 and len(result.stderr.splitlines()) == 1)


def test_a_note_left_in_a_run_folder_does_not_stop_another_run(settings, tmp_path):
    other = tmp_path / "other"
    (other / "logs").mkdir(parents=True)
    with started(settings, tmp_path) as script:
        (other / "logs" / "localhost.pid").write_text(f"{script.pid}\n")
        assert launch(TRAIN, "--stop", **settings | {"OUTPUT_DIR": other}).returncode == 0
        assert script.poll() is None
        assert launch(TRAIN, "--stop", **settings).returncode == 0 and script.wait(30) == 75


def test_a_run_in_an_oddly_named_folder_can_be_stopped(settings, tmp_path):
    odd = tmp_path / "a 'b' \"c\" $(touch pwned) * [x] é#"
    settings |= {"OUTPUT_DIR": f"{odd}/"}
    with started(settings, tmp_path) as script:
        beside = settings | {"OUTPUT_DIR": odd.parent / "a 'b' \"c\" $(touch pwned) xx [x] é#"}
        assert launch(TRAIN, "--kill", **beside).returncode == 0 and script.poll() is None
        assert (
            launch(
                TRAIN, "--stop", **settings | {"OUTPUT_DIR": f"{tmp_path}//run/../{odd.name}"}
            ).returncode
            == 0
        )
        assert script.wait(30) == 75 and (odd / "logs" / "localhost.log").is_file()
    assert not (ROOT / "pwned").exists()


def test_kill_ends_what_does_not_listen(settings, tmp_path):
    with started(settings, tmp_path) as script:
        assert launch(TRAIN, "--kill", **settings).returncode == 0
        assert script.wait(30) == 137


def test_no_worker_outlives_torchrun(settings, tmp_path):
    assert launch(TRAIN, DO="orphan", **settings).returncode == 137
    process = Path("/proc", (tmp_path / "run" / "orphan").read_text().strip(), "cmdline")
    assert (
        not process.exists() or not process.read_bytes()
    )  # nobody may have asked for its exit code yet


def test_a_launcher_that_ends_leaves_the_workers_of_another_alone(settings, tmp_path):
    """Two that start at the same moment do not see each other; the run folder's lock decides which of them trains."""
    do = 'SAGE_LAUNCHER=1 setsid sleep 1000 &>/dev/null & echo $! >"$OUT/other"'
    # until then it has this one's environment
    do += "; until grep -q sleep /proc/$!/comm; do sleep 0.05; done; status done; exit 0"
    assert launch(TRAIN, DO=do, **settings).returncode == 0
    other = int((tmp_path / "run" / "other").read_text())
    assert Path(f"/proc/{other}/cmdline").read_bytes() == b"sleep\x001000\x00"
    assert launch(TRAIN, "--kill", **settings).returncode == 0
    assert (
        not Path(f"/proc/{other}/cmdline").exists()
        or not Path(f"/proc/{other}/cmdline").read_bytes()
    )


def test_the_log_goes_on_when_nobody_reads(settings, tmp_path):
    command = ["bash", str(ROOT / TRAIN)]
    do = f"until [[ -e {tmp_path}/closed ]]; do sleep 0.1; done; for i in 1 2 3; do echo line $i; done"
    do += "; status done; exit 0"
    script = subprocess.Popen(command, env=environment(DO=do, **settings), stdout=subprocess.PIPE)
    script.stdout.close()
    (tmp_path / "closed").touch()
    assert (
        script.wait(30) == 0
        and "line 3\n" in (tmp_path / "run" / "logs" / "localhost.log").read_text()
    )


@pytest.mark.parametrize("name", ["logs", "logs/localhost", "logs/localhost.log"])
def test_a_log_is_not_written_through_a_link(settings, tmp_path, name):
    link = tmp_path / "run" / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "elsewhere")
    result = launch(TRAIN, DO="exit 0", **settings)
    assert result.returncode == 2 and f"{link} is a link" in result.stderr
    assert not (tmp_path / "elsewhere").exists()


def test_wrong_flags_are_refused_before_torchrun_tries_them_again_and_again(settings, tmp_path):
    result = launch(TRAIN, "--learning_rat", "1", DO="exit 0", **settings)
    assert result.returncode == 2 and not (tmp_path / "run" / "logs").exists()
    assert (
        result.stderr
        == "post_train.py: unknown flag --learning_rat; did you mean --learning_rate?\n"
    )


def test_a_file_of_variables_is_read_on_the_node(settings, tmp_path):
    (tmp_path / "secrets").write_text("SAGE_REWARD_TOKEN=hush\n")
    result = launch(
        TRAIN,
        DO="[[ $SAGE_REWARD_TOKEN == hush ]] && status done",
        ENV_FILE=tmp_path / "secrets",
        **settings,
    )
    assert result.returncode == 0 and "hush" not in result.stdout


@pytest.fixture
def slurm(settings, tmp_path):
    """srun and scontrol are small programs that start a task per node and note what they were asked."""
    program(tmp_path / "tools", "srun", SRUN)
    asked = f'if [[ $1 == show ]]; then printf "n0\\nn1\\n"; else echo "$@" >{tmp_path}/asked; fi'
    path = program(tmp_path / "tools", "scontrol", asked)
    copy = shutil.copy(ROOT / "scripts/post_train/slurm.sh", tmp_path)  # as Slurm does
    settings |= {
        "PATH": path,
        "SLURM_JOB_NODELIST": "n[0-1]",
        "SLURM_JOB_ID": 7,
        "SLURM_SUBMIT_DIR": ROOT,
    }

    def start(**more):
        return subprocess.Popen(
            ["bash", copy],
            env=environment(**settings | more),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    return start


@pytest.mark.parametrize(
    "act, code",
    [("status done; exit 0", 0), ("status preempted; exit 1", 75), ("wait", 75), ("exit 1", 1)],
)
def test_a_preempted_job_of_slurm_goes_back_into_the_queue(slurm, tmp_path, act, code):
    with slurm(DO=act) as job:
        if act == "wait":
            for number in (0, 1):
                wait_for(tmp_path / "run" / f"ready.{number}")
            job.send_signal(signal.SIGTERM)
        assert job.wait(60) == code
    assert (tmp_path / "asked").exists() == (code == 75)
    if code == 75:
        assert (tmp_path / "asked").read_text() == "requeue 7\n"


@pytest.mark.parametrize("bad, code", [("n1", 2), ("none", 0)])
def test_a_job_of_slurm_checks_all_nodes_before_it_starts_any(slurm, tmp_path, bad, code):
    act = f'if [[ $2 == *doctor ]]; then touch "$OUT/checked.$SLURM_NODEID"; [[ $SLURMD_NODENAME != {bad} ]]'
    act += "; else status done; fi"
    with slurm(DO=act, SKIP_CHECKS=0) as job:
        assert job.wait(60) == code
        said = job.stderr.read().decode()
    assert all((tmp_path / "run" / f"checked.{number}").exists() for number in (0, 1))
    assert (tmp_path / "run" / "logs").exists() == (code == 0)
    assert ("not all nodes are ready, nothing was started" in said) == (code == 2)
