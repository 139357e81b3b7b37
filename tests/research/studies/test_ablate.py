"""A grid of miniature runs: each configuration once, resumed after a signal, continued elsewhere, never mixed up."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import yaml

from research.studies import ablate, records
from research.studies.questions import ROOT, Study, StudyPlan, core_seconds, identity
from sage_grpo.exit_codes import DONE, FAILED, PREEMPTED, WRONG_INPUT

DEMO = {
    "first": Study("Which eta?", {"base": {}, "more": {"eta": 0.9, "max_steps": 2}}, seeds=1),
    "second": Study("How far from the base model?", {"base": {}}, seeds=1, measured=("path_kl",)),
}
NUMBERS = ("steps", "curves", "validation", "per_step", "collapsed")


@pytest.fixture(scope="module")
def recipe(program_folder, made_once):
    """A recipe that runs in seconds."""
    return made_once("recipe", lambda folder: write_recipe(folder, program_folder)) / "recipe.yaml"


def write_recipe(folder, program_folder):
    (folder / "prompts.txt").write_text("a red circle moving left\na green square moving right\n")
    flags = {
        "pretrained_model_root": str(program_folder), "train_prompts": [str(folder / "prompts.txt")],
        "validation_prompts": [str(folder / "prompts.txt")], "batch_size": 4, "num_generations": 2, "max_steps": 8,
        "num_sampling_steps": 2, "num_frames": 5, "height": 16, "width": 16, "guidance_scale": 1.0,
        "validation_num_inference_steps": 2, "validate_video_length": 5,
        "validate_at_step0": True, "validation_interval": 4, "save_interval": 0, "reward_model": ["shapes"],
        "kl_weight": 0.3, "kl_schedule": "fixed", "enable_gradient_checkpointing": False, "report_to": ["none"],
        "use_lora": True, "lora_r": 4, "lora_alpha": 8,
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(flags))


@pytest.fixture(scope="module")
def call(recipe):
    """call(place, FLAG...) -> exit code of ablate.py for DEMO with its folders in `place`."""

    def run(place, *flags):
        places = [
            "--recipe",
            str(recipe),
            "--work",
            str(place / "work"),
            "--results",
            str(place / "results.jsonl"),
        ]
        return ablate.main([*places, "--commit", "abc", *map(str, flags)], DEMO)

    return run


@pytest.fixture(scope="module")
def done(call, made_once):
    """The grid, stopped in its first run, then finished from a copy of its work folder: the places of both parts."""

    def make(folder):
        here, there = folder / "here", folder / "there"
        begun = here / "work" / "first-base-1" / "status.json"
        when_begun(begun, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert call(here, "--studies", "second") == PREEMPTED
        shutil.copytree(here / "work", there / "work")
        assert call(there) == DONE

    folder = made_once("grid", make)
    return folder / "here", folder / "there"


def when_begun(status, then):
    """In a thread: call `then` once a run has done an iteration."""

    def watch():
        for _ in range(1200):
            if status.is_file() and json.loads(status.read_text())["step"] >= 1:
                break
            time.sleep(0.05)
        then()

    threading.Thread(target=watch, daemon=True).start()


def results_in(place):
    """The records in a place, by name."""
    runs = records.read_all(place / "results.jsonl").values()
    return {records.name_of(record): record for record in runs}


@pytest.mark.slow
def test_every_configuration_runs_once_and_leaves_one_line(call, done, capsys):
    """Slow: real runs in processes of their own; the plan, the records and the refusals are tested without."""
    _, there = done
    found = results_in(there)
    assert list(found) == ["first-base-1", "first-more-1"]
    record = found["first-more-1"]
    assert (record["study"], record["arm"], record["seed"], record["commit"]) == (
        "first",
        "more",
        1,
        "abc",
    )
    assert record["config"]["eta"] == 0.9 and record["config"]["kl_weight"] == 0.3
    assert (
        record["steps"] == [1, 2]
        and record["validation"]["step"] == [0, 2]
        and "torch" in record["versions"]
    )
    assert "path_kl" not in record
    shared = found["first-base-1"]  # its first study does not ask for the KL, its second does
    assert (
        shared["path_kl"]["clips"] == 2 and records.path_kl(shared) == shared["path_kl"]["mean"] > 0
    )
    assert not list((there / "work").glob("*/checkpoints"))
    written = (there / "results.jsonl").read_bytes()
    assert call(there) == DONE and (there / "results.jsonl").read_bytes() == written
    assert "2 of 2 runs are done" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed_elsewhere_gives_the_same_numbers(done, recipe, tmp_path):
    """Slow: real runs in processes of their own; resuming to the bit is tested in tests/train/test_resume.py."""
    here, there = done
    stopped = json.loads((here / "work" / "first-base-1" / "status.json").read_text())
    assert (
        stopped["state"] == "preempted"
        and 1 <= stopped["step"] < 8
        and not (here / "results.jsonl").exists()
    )
    saved = here / "work" / "first-base-1" / "checkpoints" / f"step-{stopped['step']:06d}"
    assert (saved / "manifest.json").is_file()
    starts = (there / "work" / "first-base-1" / "metrics.jsonl").read_text().count('"kind": "run"')
    resumed = results_in(there)["first-base-1"]
    assert starts == 2 and resumed["steps"] == list(range(1, 9))

    run = next(iter(StudyPlan(recipe=recipe, studies=DEMO).runs.values()))
    # In a process of its own, like the runs of a study. The last bits depend on the number of threads, and on oneDNN,
    # which torch turns off for the rest of a process at its first product in bf16 on a processor that has none: an
    # earlier test may have done that here.
    command = [sys.executable, str(ROOT / "post_train.py"), "--config", str(recipe), "--seed", "1"]
    command += ["--output_dir", str(tmp_path / "run")]
    assert subprocess.run(command, env=os.environ | ablate.SETTINGS).returncode == DONE
    straight = records.distil(run, tmp_path / "run", "abc")
    assert {name: resumed[name] for name in NUMBERS} == {name: straight[name] for name in NUMBERS}


def test_a_changed_configuration_is_refused(call, recipe, tmp_path, capsys):
    run = next(iter(StudyPlan(recipe=recipe, studies=DEMO).runs.values()))
    (tmp_path / "work" / run.name).mkdir(parents=True)
    (tmp_path / "work" / run.name / "run.json").write_text(
        json.dumps(identity(run.config) | {"eta": 0.8})
    )
    assert call(tmp_path) == WRONG_INPUT
    error = capsys.readouterr().err
    assert (
        "first-base-1 was made with eta 0.8, but the study now says 0.5: delete or move it" in error
    )


@pytest.mark.slow
def test_results_of_another_configuration_are_refused(call, done, tmp_path, capsys):
    """Slow: the results of real runs; other results are refused in tests/research/studies/test_records.py."""
    record = results_in(done[1])["first-more-1"]
    records.append(tmp_path / "results.jsonl", record | {"arm": "base"})
    assert call(tmp_path) == WRONG_INPUT
    assert (
        "first-base-1 was made with eta 0.9, but the study now says 0.5" in capsys.readouterr().err
    )


def test_an_unknown_study_is_refused(call, tmp_path, capsys):
    assert call(tmp_path, "--studies", "third") == WRONG_INPUT
    assert "there is no study third; choose from first, second" in capsys.readouterr().err


@pytest.mark.slow
def test_the_list_counts_shared_runs_once(call, done, capsys):
    """Slow: the list of real runs; an unfinished plan is listed by every program's own test."""
    assert call(done[1], "--list") == DONE
    rows = {line.split()[0]: line.split()[1:5] for line in capsys.readouterr().out.splitlines()}
    assert rows["first"] == ["2", "1", "2", "2"] and rows["second"] == ["1", "1", "0", "0"]
    assert rows["all"][:2] == ["2", "2"]


@pytest.mark.parametrize("cut, started", [(False, ["first-more-1"]), (True, ["first-base-1"])])
def test_nothing_new_is_started_that_cannot_end_unless_it_may_be_cut(
    recipe, tmp_path, monkeypatch, cut, started
):
    found, runs = [], list(StudyPlan(recipe=recipe, studies=DEMO).runs.values())
    monkeypatch.setattr(
        ablate.Grid,
        "start",
        lambda grid, run: found.append(run.name) or grid.running.update({1: run}),
    )
    grid = ablate.Grid(runs, tmp_path / "work", tmp_path / "results.jsonl", "abc")
    costs = [core_seconds(run.config) for run in runs]
    assert costs[1] < costs[0]
    grid.pace = [2.0]
    grid.fill(
        1, time.monotonic() + ablate.SAVING_SECONDS + costs[0] + costs[1], cut
    )  # at this pace too short for the base
    assert found == started and [run.name for run in grid.left] == sorted(
        {"first-base-1", "first-more-1"} - set(found)
    )


@pytest.mark.parametrize(
    "message, code",
    [("the gradient was not finite 6 times in a row", DONE), ("nothing moved for 600 s", FAILED)],
)
@pytest.mark.slow
def test_only_numbers_that_are_lost_are_a_result(
    call, done, recipe, tmp_path, capsys, message, code
):
    """A run that training had to stop is a collapse; one that a machine stopped is not.

    Slow: runs in processes of their own.
    """

    class Ended:
        exitcode = FAILED

    runs = [
        run for run in StudyPlan(recipe=recipe, studies=DEMO).runs.values() if run.arm == "more"
    ]
    grid = ablate.Grid(runs, tmp_path / "work", tmp_path / "results.jsonl", "abc")
    (tmp_path / "work" / runs[0].name).mkdir()
    for name, text in (
        ("status.json", json.dumps({"step": 2, "state": "failed", "message": message})),
        ("metrics.jsonl", None),
    ):
        text = text or (done[1] / "work" / runs[0].name / name).read_text()
        (tmp_path / "work" / runs[0].name / name).write_text(text)
    grid.left, grid.running = [], {Ended(): ablate.Started(runs[0], time.monotonic() - 30, 10.0)}
    grid.collect()
    assert bool(grid.broken) == (code == FAILED)
    found = results_in(tmp_path)
    assert list(found) == (["first-more-1"] if code == DONE else [])
    if code == DONE:
        assert found["first-more-1"]["collapsed"] == message
        assert grid.pace == [pytest.approx(3, abs=0.2)]
