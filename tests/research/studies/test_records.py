"""What a record keeps of a run, how much space it takes, and when a run counts as collapsed."""

import dataclasses
import math
import multiprocessing

import numpy as np
import pytest

from research.studies import questions, records
from research.studies.questions import StudyPlan, identity
from sage_grpo.config.fields import ConfigError
from tests.tools.fake_run import run_line, train_line, write_lines

RUN = next(iter(StudyPlan(["last_step"], 1).runs.values()))


def validation_line(step, reward=0.5, distance=0.05):
    values = dict.fromkeys(records.VALIDATED, 0.3) | {
        "reward/total": reward,
        "gold/distance": distance,
    }
    return {
        "kind": "validation",
        "step": step,
        **values,
        **{f"{name}_stderr": 0.1 for name in values},
    }


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    lines = [run_line(), validation_line(0)]
    lines += [train_line(step, rng) for step in range(3, 121, 3)]
    write_lines(tmp_path, [*lines, validation_line(60), validation_line(120, 0.71234567)])
    return tmp_path


def test_a_run_becomes_a_short_line_and_comes_back(folder):
    record = records.distil(RUN, folder, "abc")
    records.append(folder / "a.jsonl", record)
    assert records.read_all(folder / "a.jsonl") == {record["digest"]: record}
    # every curve changes here, which none of a real run does
    assert (folder / "a.jsonl").stat().st_size < 8500
    assert record["steps"] == list(range(3, 121, 3)) and record["device"] == "NVIDIA H200"
    assert records.validated(record, "reward/total") == 0.71235
    assert records.validated(record, "reward/total", 0) == 0.5
    assert (
        record["curves"]["policy/skipped_updates"] == 0.0
        and len(record["curves"]["reward/total"]) == 40
    )
    assert records.curve(record, "policy/skipped_updates").tolist() == [0.0] * 40
    assert len(record["per_step"]["grad_v"]) == 20 and record["seconds"]["update"] == pytest.approx(
        14.3, abs=0.2
    )


def test_a_flag_that_came_later_has_its_default_in_older_results(folder):
    record = records.distil(RUN, folder, "abc")
    older = {name: value for name, value in record["config"].items() if name != "use_kl_balancing"}
    records.append(folder / "a.jsonl", record | {"config": older})
    assert list(records.read_all(folder / "a.jsonl")) == [record["digest"]]
    records.check_same(RUN, "a run", older)
    changed = dataclasses.replace(
        RUN, config=dataclasses.replace(RUN.config, use_kl_balancing=True)
    )
    assert records.digest(identity(changed.config)) != record["digest"]
    with pytest.raises(
        ConfigError, match="was made with use_kl_balancing False, but the study now says True"
    ):
        records.check_same(changed, "a run", older)


def test_a_default_that_is_none_any_more_means_what_todays_does(folder):
    record = records.distil(RUN, folder, "abc")
    older = record["config"] | questions.FORMER_DEFAULTS
    records.append(folder / "a.jsonl", record | {"config": older})
    assert list(records.read_all(folder / "a.jsonl")) == [record["digest"]]
    records.check_same(RUN, "a run", older)
    for name, value in {"lora_target_modules": ["to_q"], "lora_dropout": 0.1}.items():
        assert records.digest(older | {name: value}) != record["digest"]
        with pytest.raises(
            ConfigError, match=f"was made with {name} .*, but the study now says None"
        ):
            records.check_same(RUN, "a run", older | {name: value})


def test_the_results_in_the_repository_are_those_of_the_studies():
    found, plan = records.read_all(questions.RECORDS / "first.jsonl"), StudyPlan()
    assert len(found) == 295 and found.keys() <= plan.runs.keys()
    for key, record in found.items():
        records.check_same(plan.runs[key], records.name_of(record), record["config"])


def test_a_default_that_has_changed_since_is_noticed(folder, monkeypatch):
    records.append(folder / "a.jsonl", records.distil(RUN, folder, "abc"))
    monkeypatch.setitem(questions.DEFAULTS, "adv_clip_max", 4.0)
    with pytest.raises(ConfigError, match="or a default has changed since"):
        records.read_all(folder / "a.jsonl")


def test_numbers_that_are_none_stay_none():
    assert records.rounded([1.23456789e-5, math.nan, 0.0], 4) == [1.235e-5, None, 0.0]
    assert records.shortened([2.0, 2.0]) == 2.0 and records.shortened([None, 2.0]) == [None, 2.0]


def test_a_run_that_was_stopped_has_no_last_validation(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(
        "\n".join(lines[:30]) + "\n"
    )  # before the one in the middle
    record = records.distil(RUN, folder, "abc", "the gradient was not finite")
    assert record["collapsed"] == "the gradient was not finite"
    assert (
        math.isnan(records.validated(record, "reward/total"))
        and records.validated(record, "gold/match", 0) == 0.3
    )
    assert math.isnan(records.validated(record, "gold/match", 1))


@pytest.mark.parametrize(
    "reward, distance, reason",
    [
        (0.5, 0.05, ""),
        (0.31, 0.05, ""),
        (0.29, 0.05, "the reward fell"),
        (0.5, 0.074, ""),
        (0.5, 0.076, "the clips left"),
    ],
)
def test_collapse(folder, reward, distance, reason):
    """Two standard errors of the first validation are 0.2; half as far again is 0.075."""
    write_lines(folder, [run_line(), validation_line(0), validation_line(120, reward, distance)])
    found = records.distil(RUN, folder, "abc")["collapsed"]
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_results_that_were_edited_are_refused(folder):
    record = records.distil(RUN, folder, "abc")
    records.append(folder / "a.jsonl", record | {"config": record["config"] | {"eta": 0.9}})
    with pytest.raises(ConfigError, match=rf"a\.jsonl: {RUN.name} was edited"):
        records.read_all(folder / "a.jsonl")


def append_many(path, record, first, count):
    for seed in range(first, first + count):
        records.append(path, record | {"seed": seed})


def test_processes_that_append_at_once_lose_no_line(tmp_path):
    """Four processes, fifty lines each, of a length that no single write to disk holds."""
    path = tmp_path / "a.jsonl"
    record = {"study": "s", "arm": "a", "text": "x" * 20_000}
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=append_many, args=(path, record, first, 50))
        for first in range(0, 200, 50)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    lines = records.read_lines(path)
    assert sorted(line["seed"] for line in lines) == list(range(200))
    assert all(line["text"] == record["text"] for line in lines)


def test_a_line_that_a_dying_process_left_is_skipped_and_replaced(tmp_path):
    path = tmp_path / "a.jsonl"
    records.append(path, {"seed": 1})
    with path.open("ab") as file:
        file.write(b'{"seed": 2, "cur')
    assert records.read_lines(path) == [{"seed": 1}]
    records.append(path, {"seed": 3})
    assert records.read_lines(path) == [{"seed": 1}, {"seed": 3}]


def test_a_broken_line_is_refused_and_no_file_means_no_results(tmp_path):
    assert records.read_all(tmp_path / "none.jsonl") == {}
    (tmp_path / "a.jsonl").write_text('{"seed": 1}\n{"se\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl has a line that is not JSON"):
        records.read_all(tmp_path / "a.jsonl")
