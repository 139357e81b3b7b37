"""The lock of a run folder: who may train there, who may take over from whom, and what real starts make of it."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import post_train
from sage_grpo.config.fields import ConfigError
from sage_grpo.config.parse import from_values
from sage_grpo.runs import lock
from sage_grpo.runs.folder import RunFolder
from sage_grpo.runs.lock import NAME, Lock
from tests.disks import fill, small_disk
from tests.dist import CONTEXT, ROOT, run_ranks
from tests.smallest_run import command_line, prepare_process, slow

PATIENCE = 300  # seconds
ELSEWHERE = b"process 7 on far-away since 2026-11-01 12:00:00 +0000\nfar-away boot pid:[1] user 0\n7\n1\ntoken"
PREAMBLE = "from pathlib import Path; from sage_grpo.runs import lock; folder = Path({!r}); lock.BEAT = 0.02\n"
HOLDING = PREAMBLE + "held = lock.Lock(folder, False, 0); print('held', flush=True); input()\n"


@pytest.fixture(autouse=True)
def quick_locks(monkeypatch):
    for name, value in {"BEAT": 0.02, "LOOK": 0.02, "STALE": 20}.items():
        monkeypatch.setattr(lock, name, value)


@pytest.fixture
def holder():
    """holder(folder) -> a process that holds its lock until it is told to end."""
    started = []

    def start(folder):
        code = HOLDING.format(str(folder))
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        started.append(subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes))
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def take(folder, patient=False, wait=PATIENCE):
    return Lock(folder, patient, wait)


def kill_and_leave(process):
    """Killed, but not waited for by its parent, as between a worker's death and its launcher's notice."""
    process.kill()
    until(
        lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    )


def test_a_lock_names_its_process_and_is_renewed_and_removed(tmp_path):
    held = take(tmp_path / "a" / "b")
    path = tmp_path / "a" / "b" / NAME
    assert path.read_text().startswith(f"process {os.getpid()} on {os.uname()[1]} since 20")
    first = path.stat().st_mtime_ns
    until(lambda: path.stat().st_mtime_ns > first)
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_only_folders_that_were_made_for_it_and_are_empty_go_with_it(tmp_path):
    (tmp_path / "old").mkdir()
    for name in ("old", "new/run"):
        held = take(tmp_path / name)
        if name == "new/run":
            (tmp_path / "new" / "notes.txt").touch()
        held.release()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "notes.txt", "old"]


def test_a_lock_goes_when_nobody_refers_to_it_or_its_process_ends(tmp_path, holder):
    held = take(tmp_path / "run")
    del held
    gc.collect()
    assert not (tmp_path / "run").exists()
    process = holder(tmp_path / "run")
    process.communicate("end\n")
    assert process.returncode == 0 and not (tmp_path / "run").exists()


def test_a_living_process_keeps_its_lock(tmp_path, holder):
    process = holder(tmp_path)
    before = (tmp_path / NAME).read_bytes()
    os.kill(process.pid, signal.SIGSTOP)  # even if it does nothing
    with pytest.raises(ConfigError) as error:
        take(tmp_path)
    text = f"output_dir {tmp_path} is in use by process {process.pid} on {os.uname()[1]} since 20"
    assert str(error.value).startswith(text)
    assert "stop it, or give another output_dir" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).read_bytes() == before


def test_a_patient_start_waits_for_a_release_and_not_for_ever(tmp_path, holder, capfd):
    process = holder(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by process {process.pid} "):
        take(tmp_path, patient=True, wait=0.2)
    timer = threading.Timer(0.3, lambda: process.communicate("end\n"))
    timer.start()
    held = take(tmp_path, patient=True)
    timer.join()
    assert process.returncode == 0 and (tmp_path / NAME).read_bytes() == held.content
    assert capfd.readouterr().err.count(f"in use by process {process.pid} ") == 2  # once per start


def test_a_killed_process_is_succeeded_at_once(tmp_path, holder):
    kill_and_leave(holder(tmp_path))
    take(tmp_path, wait=0).release()


def test_a_process_with_the_number_of_a_dead_one_is_not_taken_for_it(tmp_path):
    held = take(tmp_path)
    who, machine, _, started, token = held.content.decode().split("\n")
    held.release()
    (tmp_path / NAME).write_text("\n".join([who, machine, "1", started, token]))
    take(tmp_path, wait=0).release()


def test_a_process_may_open_its_folder_again(tmp_path):
    of_other_tests = set(threading.enumerate())
    first = take(tmp_path)
    again = take(tmp_path, wait=0)
    first.release()
    until(lambda: len(set(threading.enumerate()) - of_other_tests) == 1)
    assert (tmp_path / NAME).read_bytes() == again.content


@pytest.mark.parametrize("clock", [0, 4e9], ids=["late", "early"])
def test_a_lock_from_elsewhere_is_stale_once_it_is_seen_not_to_change(tmp_path, capfd, clock):
    (tmp_path / NAME).write_bytes(ELSEWHERE)
    os.utime(tmp_path / NAME, (clock, clock))
    with pytest.raises(ConfigError, match="in use by process 7 on far-away since 2026-11-01"):
        take(tmp_path, patient=True, wait=0.1)
    held = take(tmp_path)
    assert (tmp_path / NAME).read_bytes() == held.content
    assert "in use by process 7 on far-away" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["renewed", "rewritten"])
@pytest.mark.parametrize("patient", [False, True])
def test_a_living_lock_from_elsewhere_is_refused(tmp_path, how, patient):
    path = tmp_path / NAME
    stop = threading.Event()
    path.write_bytes(ELSEWHERE)

    def live():  # far from this machine's clock, and slower than the looks
        for number in range(10**6):
            if stop.wait(0.1):
                return
            if how == "rewritten":
                draft = tmp_path / "draft"
                draft.write_bytes(ELSEWHERE + str(number).encode())
                os.replace(draft, path)
            os.utime(path, (number, number))

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="in use by process 7 on far-away"):
            take(tmp_path, patient, wait=2 if patient else PATIENCE)
        assert (tmp_path / NAME).read_bytes().startswith(ELSEWHERE)
    finally:
        stop.set()
        thread.join()


STRANGE = [b"", b"\xff\n\n", b"\x1b[2J", b"one line", ELSEWHERE.replace(b"\n", b"\0"), b"1" * 10**6]


@pytest.mark.parametrize("strange", STRANGE, ids=lambda value: repr(value[:12]))
def test_a_lock_that_cannot_be_read_is_one_from_elsewhere(tmp_path, strange):
    (tmp_path / NAME).write_bytes(strange)
    with pytest.raises(ConfigError, match="is in use by") as error:
        take(tmp_path, wait=0)
    assert str(error.value).isprintable()
    take(tmp_path).release()


@pytest.mark.parametrize(
    "make", [Path.mkdir, lambda path: path.symlink_to("away")], ids=["folder", "link"]
)
def test_what_is_no_lock_file_is_left_alone(tmp_path, make):
    make(tmp_path / NAME)
    with pytest.raises(OSError):
        take(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_start_that_is_killed_while_it_takes_over_is_no_obstacle(tmp_path, holder):
    first = holder(tmp_path)
    kill_and_leave(first)
    stamp = (tmp_path / NAME).stat().st_mtime_ns
    second = tmp_path / f"lock.after-{stamp}"
    second.write_bytes((tmp_path / NAME).read_bytes())
    (tmp_path / "lock.after-1").write_bytes(second.read_bytes())
    held = take(tmp_path, patient=True)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).read_bytes() == held.content


def test_a_deleted_lock_comes_back(tmp_path):
    held = take(tmp_path / "run")
    (tmp_path / "run" / NAME).unlink()
    until((tmp_path / "run" / NAME).is_file)
    (tmp_path / "run").rename(tmp_path / "away")  # no error of its thread either
    time.sleep(0.1)
    (tmp_path / "away").rename(tmp_path / "run")
    assert (tmp_path / "run" / NAME).read_bytes() == held.content


def test_a_full_disk_does_not_make_a_lock_stale(tmp_path):
    with small_disk(tmp_path / "disk", 1):
        held = take(tmp_path / "disk")
        path = tmp_path / "disk" / NAME
        fill(tmp_path / "disk" / "filler")
        with pytest.raises(OSError):
            (tmp_path / "disk" / "more").write_bytes(b"1" * 5000)
        first = path.stat().st_mtime_ns
        until(lambda: path.stat().st_mtime_ns > first)
        assert path.read_bytes() == held.content
        held.release()


def test_a_process_whose_folder_was_taken_over_ends_itself(tmp_path, holder):
    process = holder(tmp_path)
    draft = tmp_path / "draft"
    draft.write_bytes(ELSEWHERE)
    os.replace(draft, tmp_path / NAME)
    assert process.wait(PATIENCE) == 1
    (message,) = process.stderr.read().splitlines()
    assert message.startswith(
        f"post_train.py: output_dir {tmp_path} was taken over by process 7 on far-away"
    )
    assert (tmp_path / NAME).read_bytes() == ELSEWHERE


def test_nobody_takes_over_between_the_last_look_and_the_removal(tmp_path, holder, monkeypatch):
    kill_and_leave(holder(tmp_path))
    look = lock._look
    looks = []
    answers = []

    def look_and_pause(path):
        seen = look(path)
        looks.append(path.name)
        # this start has seen again that the lock is stale, and is about to remove it
        if len(looks) == 2:
            code = PREAMBLE.format(str(tmp_path)) + "lock.Lock(folder, True, 1); print('held')\n"
            command = [sys.executable, "-c", code]
            answers.append(subprocess.run(command, cwd=ROOT, capture_output=True, text=True))
        return seen

    monkeypatch.setattr(lock, "_look", look_and_pause)
    held = take(tmp_path, wait=0)
    assert looks[:2] == [NAME, NAME]
    assert "is in use by" in answers[0].stderr
    assert not answers[0].stdout
    assert (tmp_path / NAME).read_bytes() == held.content


RACE = """
import json, multiprocessing, os, sys
from pathlib import Path
from sage_grpo.config.fields import ConfigError
from sage_grpo.runs import lock

def race(folders, gate, answers):
    lock.LOOK, lock.STALE, kept = 0.01, 10, []
    for folder in folders:
        gate.wait()
        try:
            kept.append(lock.Lock(Path(folder), False, 60))
            answers.put((folder, os.getpid()))
        except ConfigError as error:
            answers.put((folder, str(error)))
    gate.wait()

starts, folders = int(sys.argv[1]), sys.argv[2:]
fork = multiprocessing.get_context("fork")
gate, answers = fork.Barrier(starts), fork.Queue()
for _ in range(starts):
    fork.Process(target=race, args=(folders, gate, answers), daemon=True).start()
print(json.dumps([answers.get(timeout=100) for _ in range(starts * len(folders))]))
"""


@pytest.mark.parametrize("what", ["nothing", slow("dead"), slow("elsewhere")])
def test_of_many_starts_at_once_exactly_one_wins(tmp_path, holder, what):
    """Every process tries to take one folder after another, each at the same moment as all others do."""
    starts = 8
    count = 30 if what == "elsewhere" else 100
    folders = [tmp_path / f"run-{number}" for number in range(count)]
    kill_and_leave(holder(tmp_path))
    locks = {"dead": (tmp_path / NAME).read_bytes(), "elsewhere": ELSEWHERE}
    if what in locks:
        for folder in folders:
            folder.mkdir()
            (folder / NAME).write_bytes(locks[what])
    command = [sys.executable, "-c", RACE, str(starts), *map(str, folders)]
    raced = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    said = json.loads(raced.stdout)
    for folder in folders:
        outcomes = [outcome for name, outcome in said if name == str(folder)]
        (winner,) = [outcome for outcome in outcomes if isinstance(outcome, int)]
        refused = [outcome for outcome in outcomes if outcome != winner]
        assert len(refused) == starts - 1
        assert all(f"is in use by process {winner} " in text for text in refused)


# real starts


@pytest.fixture
def words(flags):
    """words(flag=value, ...) -> a command line of post_train.py."""
    quick = {"max_steps": 6, "save_interval": 2, "validation_interval": 0, "num_sampling_steps": 2}

    return lambda **changes: command_line(flags | quick | changes)


def run_main(words, said, gate=None):
    prepare_process()
    with said.open("w", buffering=1) as file:
        os.dup2(file.fileno(), 2)
        if gate:
            gate.wait(PATIENCE)
        code = post_train.main(words)
    os._exit(code)


def start(words, said, gate=None):
    process = CONTEXT.Process(target=run_main, args=(words, said, gate))
    process.start()
    return process


def ended(process):
    process.join(PATIENCE)
    assert process.exitcode is not None
    return process.exitcode


def sentence(said):
    (line,) = [line for line in said.read_text().splitlines() if line.startswith("post_train.py: ")]
    return line


def kinds(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["kind"], line["step"]) for line in lines]


@pytest.mark.slow
def test_two_starts_at_once_are_one_run(words, tmp_path):
    """Slow: two whole runs; test_of_many_starts_at_once_exactly_one_wins has the lock alone."""
    gate = CONTEXT.Barrier(2)
    said = [tmp_path / name for name in "ab"]
    processes = [start(words(), file, gate) for file in said]
    codes = [ended(process) for process in processes]
    assert sorted(codes) == [0, 2], [file.read_text() for file in said]
    assert "in use by process" in sentence(
        said[codes.index(2)]
    ) or "already holds a run" in sentence(said[codes.index(2)])
    assert kinds(tmp_path / "run") == [
        ("run", 0),
        *(("train", step) for step in range(1, 7)),
        ("validation", 6),
    ]
    assert not list((tmp_path / "run").glob("lock*"))


def files(run):
    return {
        str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()
    }


def test_a_run_in_progress_is_refused_and_a_killed_one_continued(words, tmp_path):
    run, said = tmp_path / "run", tmp_path / "said"
    first = start(words(max_steps=1000), tmp_path / "first")
    until(lambda: (run / "checkpoints" / "step-000002").is_dir())
    os.kill(first.pid, signal.SIGSTOP)
    before = files(run)
    for changes in ({"overwrite": True}, {"resume_from_checkpoint": "auto", "start_timeout": 2}):
        assert ended(start(words(**changes), said)) == 2
        assert (
            f"output_dir {run} is in use by process {first.pid} on {os.uname()[1]} since "
            in sentence(said)
        )
        assert files(run) == before
    first.kill()
    last = kinds(run)[-1][1] + 2
    again = words(resume_from_checkpoint="auto", start_timeout=2, max_steps=last)
    assert ended(start(again, said)) == 0, said.read_text()
    assert [kind for kind, _ in kinds(run)].count("run") == 2 and ("train", last) in kinds(run)
    assert not list(run.glob("lock*"))


def refusal(ranks, values):
    try:
        RunFolder(from_values(values), ranks).take()
    except ConfigError as error:
        return str(error)


def test_all_ranks_get_the_same_refusal_and_the_folder_is_free_again(flags, tmp_path, holder):
    process = holder(tmp_path / "run")
    one, two = run_ranks(2, refusal, flags)
    assert one == two and f"is in use by process {process.pid} " in one
    process.communicate("end\n")
    assert run_ranks(2, refusal, flags) == [None, None]


def test_a_start_with_wrong_input_leaves_no_folder(words, tmp_path, capfd):
    deep = tmp_path / "a" / "b" / "run"
    assert post_train.main(words(output_dir=deep, updates_per_rollout=3)) == 2
    assert "updates_per_rollout is 3" in capfd.readouterr().err and not (tmp_path / "a").exists()
