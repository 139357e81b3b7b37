"""due.sh third: whatever ends it, an archive of the records is left; unpacked elsewhere, it is continued."""

import os
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from research.studies.questions import ROOT

# In place of Python: notes how many records it finds, then waits for a signal, on which it saves and adds another.
STUDY = """
import pathlib, signal, sys
flags = dict(zip(sys.argv, sys.argv[1:]))
results = pathlib.Path(flags["--results"])

def add():
    known = results.read_text() if results.is_file() else ""
    results.write_text(known + f"record {known.count('record')}\\n")

def save(*_):
    add()
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
add()
if float(flags["--budget_minutes"]) < 1:
    save()
signal.pause()
"""
RECORDS = "research/studies/records/third.jsonl"


@pytest.fixture
def third(tmp_path):
    """third(OUTPUT, seconds) -> the process of a rehearsal whose studies are pretended."""
    script = tmp_path / "study.py"
    script.write_text(STUDY)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)
    env = os.environ | {"PYTHON": str(python), "REHEARSE": "1", "COMMIT": "abc", "EVERY": "0.1"}

    def start(output, seconds):
        command = ["bash", str(ROOT / "research/benchmarks/due.sh"), "third", str(output)]
        return subprocess.Popen([*command, str(seconds)], env=env, start_new_session=True)

    return start


def archived(output):
    """The records in the archive; empty while there is none."""
    archive = output / "third.tar.gz"
    if not archive.is_file():
        return []
    with tarfile.open(archive) as file:
        if RECORDS not in file.getnames():
            return []
        return file.extractfile(RECORDS).read().decode().splitlines()


def when_archived(output):
    for _ in range(600):
        if archived(output):
            return
        time.sleep(0.05)
    raise AssertionError("no archive")


@pytest.mark.parametrize("end", ["time", "SIGTERM", "SIGKILL"])
def test_an_archive_is_left(third, tmp_path, end):
    output = tmp_path / "output"
    process = third(output, 60 if end == "time" else 600)
    if end == "time":
        assert process.wait(timeout=60) == 0
    else:
        when_archived(output)
        # a lease that ends kills all at once; a signal reaches the script alone
        send = os.killpg if end == "SIGKILL" else os.kill
        send(process.pid, signal.Signals[end])
        process.wait(timeout=60)
    saved = ["record 1"] if end != "SIGKILL" else []
    assert archived(output) == ["record 0", *saved]


def test_what_is_unpacked_is_continued(third, tmp_path):
    assert third(tmp_path / "here", 60).wait(timeout=60) == 0
    with tarfile.open(tmp_path / "here" / "third.tar.gz") as file:
        file.extractall(tmp_path / "there" / "rehearsal", filter="data")
    assert third(tmp_path / "there", 60).wait(timeout=60) == 0
    assert archived(tmp_path / "there") == [f"record {number}" for number in range(4)]
