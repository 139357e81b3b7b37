"""The run folder: what may be written where, and what each of its small files says."""

import json
import subprocess
from contextlib import suppress

import pytest
import torch
import yaml

from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.runs.folder import CONTENTS, RunFolder
from sage_grpo.runs.history import read_run
from tests.disks import small_disk

FIRST, SECOND = (Ranks(rank, 2, torch.device("cpu")) for rank in (0, 1))
ALONE = Ranks(0, 1, torch.device("cpu"))


def made(folder, ranks=FIRST, **flags):
    return RunFolder(Config(output_dir=str(folder), report_to=("none",), **flags), ranks)


@pytest.mark.parametrize("name", CONTENTS)
def test_a_folder_that_holds_a_run_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(
        ConfigError,
        match=f"already holds a run .{name}.*--resume_from_checkpoint auto.*--overwrite",
    ):
        made(tmp_path)


def test_nothing_is_written_before_it_is_opened_and_nothing_by_other_ranks(tmp_path):
    for run in (made(tmp_path / "run"), made(tmp_path / "run", SECOND)):
        assert not run.path.exists()
    run.open(0)
    run.log("train", 1, {})
    run.write_status("running", 1, "")
    run.close()
    assert not run.path.exists()


def test_only_what_a_run_writes_is_replaced(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("metrics.jsonl", "checkpoints/old", "notes.txt"):
        (tmp_path / name).write_text("old")
    made(tmp_path, resume_from_checkpoint="auto", overwrite=True).open(3)
    assert (tmp_path / "checkpoints" / "old").is_file()
    run = made(tmp_path, overwrite=True)
    run.open(0)
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "command.txt", "notes.txt"}
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["output_dir"] == str(tmp_path)
    assert run.checkpoints == tmp_path / "checkpoints"
    assert run.validation_folder(7).name == "step-000007"


def test_it_is_known_what_was_validated_by_the_present_yardstick(tmp_path):
    run = made(tmp_path / "run")
    assert run.validated_steps() == []
    run.open(0)
    run.log("train", 1, {})
    run.log("validation", 12, {})
    assert run.validated_steps() == [12]
    run.log("break", 12, {"series": ["train"]})
    assert run.validated_steps() == [12]
    run.log("break", 12, {"series": ["validation"]})
    assert run.validated_steps() == []
    run.log("validation", 12, {})
    assert run.validated_steps() == [12]


def mine(folder):
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("name", [*CONTENTS, "notes.txt"])
def test_overwriting_what_never_was_a_run_is_refused(tmp_path, name):
    run = tmp_path / "run"
    run.mkdir()
    (run / name).write_text("mine")
    with pytest.raises(
        ConfigError,
        match=f"overwrite is True, but output_dir {run} holds {name} and never was a run",
    ):
        made(run, ALONE, overwrite=True).take()
    assert mine(run) == {name: "mine"}


def test_a_launchers_logs_and_a_left_lock_are_no_reason_not_to_overwrite(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "lock.after-1").touch()
    run = made(tmp_path, ALONE, overwrite=True)
    run.take()
    run.open(0)
    run.close()
    (tmp_path / "report.html").touch()
    again = made(tmp_path, ALONE, overwrite=True)
    again.take()
    again.open(0)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.yaml",
        "command.txt",
        "logs",
        "lock",
    }
    again.close()
    assert not (tmp_path / "lock").exists()


def test_a_link_is_replaced_and_what_it_leads_to_is_not(tmp_path):
    (tmp_path / "disk" / "precious").mkdir(parents=True)
    run = made(tmp_path / "run", ALONE)
    run.open(0)
    (run.path / "checkpoints").symlink_to(tmp_path / "disk")
    made(run.path, ALONE, overwrite=True).open(0)
    assert (tmp_path / "disk" / "precious").is_dir() and not (run.path / "checkpoints").is_symlink()


def test_a_run_that_ended_while_another_one_waited_is_not_continued_by_it(tmp_path):
    first, second = made(tmp_path, ALONE), made(tmp_path, ALONE)  # neither finds a run
    first.take()
    first.open(0)
    first.close()
    before = mine(tmp_path)
    with pytest.raises(ConfigError, match="already holds a run"):
        second.take()
    assert mine(tmp_path) == before


def test_an_output_dir_that_is_no_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("mine")
    for place, why in {
        "file": "Not a directory",
        "file/run": "Not a directory",
        "x" * 300: "File name too long",
    }.items():
        with pytest.raises(
            ConfigError, match=f"output_dir {tmp_path / place} cannot be used: {why}"
        ):
            made(tmp_path / place, ALONE)
    assert mine(tmp_path) == {"file": "mine"}


def test_an_output_dir_that_cannot_be_written_is_one_sentence(tmp_path):
    with small_disk(tmp_path / "disk", 1):
        (tmp_path / "disk" / "run").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        for name in ("run", "new", "new/er"):
            with pytest.raises(
                ConfigError, match=f"disk/{name} cannot be written: Read-only file system"
            ):
                made(tmp_path / "disk" / name, ALONE).take()


def test_a_run_opens_with_what_it_is(tmp_path):
    run = made(tmp_path)
    run.open(0)
    run.log_start(0, {"world": "shapes"})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["kind"], line["step"], line["ranks"], line["device"], line["world"]) == (
        "run",
        0,
        2,
        "CPU",
        "shapes",
    )
    assert line["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_a_changed_yardstick_is_known_whenever_a_start_is_killed(tmp_path, monkeypatch, lines):
    """A start that was killed after so many lines, and another one."""

    def started(yardstick, step, **flags):
        run = made(tmp_path, ALONE, **flags)
        run.open(step)
        run.log_start(step, {"yardstick": {"train": {"eta": yardstick}}})
        return run

    started(0.5, 0).log("train", 1, {"reward/total": 1.0})
    with monkeypatch.context() as killed:
        write = RunFolder.log
        written = []

        def log(self, *line):
            if len(written) == lines:
                raise KeyboardInterrupt
            written.append(line)
            write(self, *line)

        killed.setattr(RunFolder, "log", log)
        with suppress(KeyboardInterrupt):
            started(0.3, 1, resume_from_checkpoint="auto")
    started(0.3, 1, resume_from_checkpoint="auto")
    (line,) = read_run(tmp_path).breaks
    assert line["changed"] == {"eta": [0.5, 0.3]}


def test_the_status_is_replaced_and_a_folder_that_is_gone_is_only_noted(tmp_path, capfd):
    run = made(tmp_path / "run")
    run.open(0)
    for step in (1, 2):
        run.write_status("running", step, "on its way")
    status = json.loads((run.path / "status.json").read_text())
    assert (status["state"], status["step"], status["message"]) == ("running", 2, "on its way")
    run.path.rename(tmp_path / "away")
    run.write_status("running", 3, "")
    assert "status.json could not be written" in capfd.readouterr().err


def test_links_that_wandb_makes_are_no_reason_not_to_resume(tmp_path):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "latest-run").symlink_to("run-1")
    made(tmp_path, ALONE, resume_from_checkpoint="auto")


PLACES = (*CONTENTS, "validation/step-000001", "tensorboard/events")


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_is_not_resumed_through_a_link(tmp_path, name, overwrite):
    folder = tmp_path / "run"
    (folder / name).parent.mkdir(parents=True)
    (tmp_path / "precious").write_text("precious")
    (folder / name).symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match=f"{name} is a link"):
        made(folder, ALONE, resume_from_checkpoint="auto", overwrite=overwrite)
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (folder / "lock").exists()
