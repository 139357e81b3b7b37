"""Parts of a long benchmark: results are kept whatever happens, and no program outlives its part."""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from research.benchmarks import parts as script


def options(folder, **changes):
    return argparse.Namespace(
        **{"output": folder / "page.md", "only": None, "limit": 100.0, "page_only": False} | changes
    )


def shown(results):
    return " ".join(
        f"{name}:{part.get('value', part.get('error'))}" for name, part in results["parts"].items()
    )


def test_a_failed_part_is_recorded_and_the_next_one_runs(tmp_path):
    parts = script.Parts(options(tmp_path), shown)

    def fails(limit):
        error = script.PartError("no")
        error.partial = {"half": 1}
        raise error

    assert parts.run("first", 10, fails) is None
    assert parts.run("second", 10, lambda limit: {"value": limit})["value"] == 10
    assert (tmp_path / "page.md").read_text() == "first:PartError: no second:10"
    stored = json.loads((tmp_path / "page.json").read_text())["parts"]
    assert stored["first"]["half"] == 1 and stored["first"]["seconds"] >= 0


def test_parts_of_an_earlier_call_are_kept(tmp_path):
    script.Parts(options(tmp_path), shown).run("first", 10, lambda limit: {"value": 1})
    parts = script.Parts(options(tmp_path, only=["second"]), shown)
    assert parts.run("first", 10, lambda limit: pytest.fail("not wanted"))["value"] == 1
    parts.run("second", 10, lambda limit: {"value": 2})
    assert (tmp_path / "page.md").read_text() == "first:1 second:2"
    script.Parts(
        options(tmp_path, page_only=True), lambda results: "again " + shown(results)
    ).write()
    assert (tmp_path / "page.md").read_text() == "again first:1 second:2"
    assert script.Parts(options(tmp_path), shown).results["parts"] == {}


def test_a_page_that_cannot_be_made_loses_no_result(tmp_path, capsys):
    parts = script.Parts(options(tmp_path), lambda results: results["missing"])
    assert parts.run("first", 10, lambda limit: {"value": 1})["value"] == 1
    assert "could not be made: KeyError('missing')" in capsys.readouterr().err
    assert json.loads((tmp_path / "page.json").read_text())["parts"]["first"]["value"] == 1


def test_the_time_of_all_parts_is_limited(tmp_path):
    parts = script.Parts(options(tmp_path, limit=3.0), shown)
    assert parts.run("first", 10, lambda limit: {"value": limit})["value"] <= 3
    parts.begun -= 5
    assert parts.run("second", 10, lambda limit: pytest.fail("too late")) is None
    assert "second:PartError: no time left" in (tmp_path / "page.md").read_text()


def test_a_program_that_takes_too_long_is_killed_with_its_children(tmp_path):
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '100']); print(p.pid, flush=True); p.wait()"
    program = script.Program([sys.executable, "-c", code], tmp_path / "log")
    while len((tmp_path / "log").read_text().splitlines()) < 2:
        time.sleep(0.05)
    child = int((tmp_path / "log").read_text().split()[-1])
    with pytest.raises(script.PartError, match="took more than 0 s"):
        program.wait(0.1)
    assert program.process.returncode == -signal.SIGKILL
    end = time.monotonic() + 60  # the signal is on its way
    while is_running(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid):
    """A killed child stays a zombie until its new parent looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_wrong_exit_code_shows_the_end_of_the_output(tmp_path):
    code = "print('1%\\r2%\\rdone'); print('why'); raise SystemExit(3)"
    program = script.Program([sys.executable, "-c", code], tmp_path / "log", VALUE=1)
    with pytest.raises(script.PartError, match=r"exit code 3: (.|\n)*done\nwhy\n$") as caught:
        program.wait(60)
    assert "1%" not in str(caught.value).splitlines()[-2]
    assert script.Program(["true"], tmp_path / "log").wait(60) == 0
    with pytest.raises(script.PartError, match="exit code 0"):
        script.Program(["true"], tmp_path / "log").wait(60, codes=(75,))


def test_programs_find_the_repository_and_what_the_caller_has(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    script.Program(["bash", "-c", "echo $PYTHONPATH; pwd"], tmp_path / "log").wait(60)
    path, folder = (tmp_path / "log").read_text().splitlines()[-2:]
    assert path.split(os.pathsep) == [str(script.ONE_GPU), str(script.ROOT), "/elsewhere"]
    assert folder == str(script.ROOT)


def test_records_are_read_by_time_and_a_torn_line_is_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"time": 3}\n{"time": 1}\n{"ti')
    (tmp_path / "b.jsonl").write_text('{"time": 2}\n')
    assert [record["time"] for record in script.recorded(tmp_path)] == [1, 2, 3]


def test_an_iteration_that_was_repeated_counts_once(tmp_path):
    lines = [
        {"kind": "train", "step": 1, "x": 1},
        {"kind": "run", "step": 0},
        {"kind": "train", "step": 2, "x": 1},
    ]
    lines.append({"kind": "train", "step": 2, "x": 2})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(line["step"], line["x"]) for line in script.metrics(tmp_path)] == [(1, 1), (2, 2)]


def test_sentences_are_wrapped_and_tables_and_code_are_not():
    long = "word " * 60
    lines = ["# " + long, "| " + long, "    " + long, "```", long, "```", "- " + long, long]
    text = script.wrapped(lines).splitlines()
    assert [len(line) > 120 for line in text[:6]] == [True, True, True, False, True, False]
    assert (
        all(len(line) <= 120 for line in text[6:])
        and text[7].startswith("  word")
        and text[-1].startswith("word")
    )
