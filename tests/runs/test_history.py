import json
import math

import numpy as np
import pytest

from sage_grpo.runs.case import Case
from sage_grpo.runs.history import RunError, about, column, read_run, yardstick_changes
from tests.tools.fake_run import make_run, read_lines, run_line, train_line, write_lines


def train(step: int, reward: float | None) -> dict:
    return {"kind": "train", "step": step, "reward/total": reward}


def validation(step: int, reward: float) -> dict:
    return {"kind": "validation", "step": step, "reward/total": reward}


def test_later_lines_of_a_step_replace_earlier_ones(tmp_path):
    first = [run_line(), *(train(step, 0.0) for step in (1, 2, 3, 4)), validation(4, 0.0)]
    write_lines(tmp_path, [*first, run_line(2), train(3, 1.0), train(4, 1.0), validation(4, 1.0)])
    run = read_run(tmp_path)
    assert column(run.full_lines, "step").tolist() == [1, 2, 3, 4]
    assert column(run.full_lines, "reward/total").tolist() == [0, 0, 1, 1]
    assert column(run.validations, "reward/total").tolist() == [1]
    assert len(run.starts) == 2


def test_what_a_resume_has_left_behind_is_dropped(tmp_path):
    first = [
        validation(0, 0.0),
        *(train(step, 0.0) for step in (1, 2, 3, 4)),
        validation(2, 0.0),
        validation(4, 0.0),
    ]
    write_lines(tmp_path, [run_line(), *first, run_line(2), train(3, 1.0)])
    run = read_run(tmp_path)
    assert column(run.full_lines, "step").tolist() == [1, 2, 3]
    assert column(run.validations, "step").tolist() == [0, 2]
    write_lines(tmp_path, [run_line(), *first, run_line(2), validation(2, 1.0)])
    assert column(read_run(tmp_path).validations, "reward/total").tolist() == [0, 1]


def broken(step: int, *series: str) -> dict:
    return {"kind": "break", "step": step, "series": list(series), "changed": {"eta": [0.5, 0.3]}}


@pytest.mark.parametrize(
    "lines, trained, validated, earlier",
    [
        # each series ends by itself, and the present one is empty until it has a result
        ([broken(2, "validation")], [1, 2], [], [[0, 2]]),
        ([broken(2, "validation"), train(3, 1.0), validation(2, 1.0)], [1, 2, 3], [2], [[0, 2]]),
        ([broken(2, "train"), train(3, 1.0)], [3], [0, 2], []),
        # a second break
        (
            [broken(2, "validation"), validation(4, 1.0), run_line(4), broken(4, "validation")],
            [1, 2],
            [],
            [[0, 2], [4]],
        ),
        # a resume from before a break makes it void; one from the break itself does not
        (
            [broken(2, "train", "validation"), train(3, 1.0), run_line(1), train(2, 0.0)],
            [1, 2],
            [0],
            [],
        ),
        ([broken(2, "validation"), run_line(2), validation(2, 1.0)], [1, 2], [2], [[0, 2]]),
    ],
)
def test_a_break_begins_another_series(tmp_path, lines, trained, validated, earlier):
    first = [run_line(), validation(0, 0.0), train(1, 0.0), train(2, 0.0), validation(2, 0.0)]
    write_lines(tmp_path, [*first, run_line(2), *lines])
    run = read_run(tmp_path)
    assert column(run.full_lines, "step").tolist() == trained
    assert column(run.validations, "step").tolist() == validated
    assert [column(part, "step").tolist() for part in run.earlier_validations] == earlier


def start(step: int, **held_out: str) -> dict:
    return {"kind": "run", "step": step, "yardstick": {"validation": held_out}}


@pytest.mark.parametrize(
    "lines, after, changed",
    [
        ([], {"held-out": "A"}, None),
        ([], {"held-out": "B"}, ["A", "B"]),
        # left out for a while, and then another one
        ([start(10), validation(20, 0.0)], {"held-out": "B"}, ["A", "B"]),
        ([start(10), validation(20, 0.0)], {"held-out": "A"}, None),
        # in a part of the run that a resume has made void
        ([start(20, **{"held-out": "B"}), start(10)], {"held-out": "A"}, None),
        # from before a break, which that makes void
        ([validation(30, 0.0), broken(30, "validation")], {"held-out": "B"}, ["A", "B"]),
        # since a break there are no results by A
        ([start(10), broken(10, "validation"), validation(20, 0.0)], {"held-out": "B"}, None),
    ],
)
def test_a_yardstick_is_compared_with_the_last_that_is_known(tmp_path, lines, after, changed):
    write_lines(tmp_path, [start(0, **{"held-out": "A"}), validation(10, 0.0), *lines])
    line = yardstick_changes(read_run(tmp_path), 20, {"train": {}, "validation": after})
    expected = {"series": ["validation"], "changed": {"held-out": changed}}
    assert line == (expected if changed else None)


def changed(before: str, after: str) -> dict:
    return broken(10, "validation") | {"changed": {"held-out": [before, after]}}


B = [changed("A", "B"), start(10, **{"held-out": "B"})]
A = [changed("B", "A"), start(10, **{"held-out": "A"})]
C = [changed("B", "C"), start(10, **{"held-out": "C"})]


@pytest.mark.parametrize(
    "lines, after, validated, left",
    [
        # a start with B left no result
        (B, "A", [0, 10], []),
        (B, "B", [], [["A", "B"]]),
        (B, "C", [], [["A", "C"]]),
        # several starts left none
        ([*B, *A, *B], "A", [0, 10], []),
        ([*B, *C], "A", [0, 10], []),
        ([*B, *C], "B", [], [["A", "B"]]),
        # a result by B, which is void after a resume from before it
        ([*B, validation(10, 1.0)], "A", [], [["A", "B"], ["B", "A"]]),
        ([*B, validation(20, 1.0)], "A", [0, 10], []),
    ],
)
def test_a_break_that_no_result_followed_is_undone(tmp_path, lines, after, validated, left):
    """A run of 10 iterations with A is started with others, by mistake."""
    limits = {"kind": "limits", "step": 1, "perfect": {"total": 2.0}, "vae_floor": None}
    begun = [start(0, **{"held-out": "A"}), limits, validation(0, 0.0), validation(10, 0.0), *lines]
    write_lines(tmp_path, begun)
    now = start(10, **{"held-out": after})
    line = yardstick_changes(read_run(tmp_path), 10, {"train": {}, **now["yardstick"]})
    new = [{"kind": "break", "step": 10, **line}] if line else []
    write_lines(tmp_path, [*begun, *new, now])
    run = read_run(tmp_path)
    assert column(run.validations, "step").tolist() == validated
    assert [line["changed"] for line in run.breaks] == [{"held-out": pair} for pair in left]
    assert run.head.get("perfect") == ({"total": 2.0} if validated else None)


@pytest.mark.parametrize(
    "first, second, validated",
    [(["train"], ["train", "validation"], []), (["train", "validation"], ["train"], [10])],
)
def test_breaks_of_other_series_are_not_joined(tmp_path, first, second, validated):
    """B has a validation but no training result. After a return to A, that validation is not one of A's."""
    begun = [start(0), train(10, 0.0), validation(0, 0.0)]
    other = [broken(10, *first), start(10), validation(10, 0.0)]
    back = broken(10, *second) | {"changed": {"eta": [0.3, 0.5]}}
    write_lines(tmp_path, [*begun, *other, back, start(10)])
    run = read_run(tmp_path)
    assert [line["series"] for line in run.breaks] == [first, second]
    assert column(run.validations, "step").tolist() == validated


def test_rewards_between_logged_iterations_belong_to_the_series_of_training(tmp_path):
    def reward_only(step):
        return train(step, 0.0) | {"kind": "reward"}

    first = [run_line(), reward_only(1), train(2, 0.0), reward_only(3), train(4, 0.0)]
    write_lines(tmp_path, [*first, run_line(3), broken(3, "train"), train(4, 1.0), reward_only(5)])
    run = read_run(tmp_path)
    assert column(run.iteration_lines, "step").tolist() == [4, 5]
    assert [column(part, "step").tolist() for part in run.earlier_iteration_lines] == [[1, 2, 3]]
    assert column(run.all_full_lines, "step").tolist() == [2, 4]
    assert run.iterations == 5
    assert column(run.until(3).iteration_lines, "step").tolist() == [1, 2, 3]
    assert run.until(3).breaks == []


def test_a_break_of_others_is_shown_as_text_or_refused(tmp_path):
    changed = {"a\n\033[2J": [1, "x" * 1000], "b": {"c": []}, "d": [1, 2, 3]}
    line = broken(1, "train", "elsewhere") | {"changed": changed}
    write_lines(tmp_path, [run_line(), train(1, 0.0), line, train(2, 0.0)])
    (sentence,) = read_run(tmp_path).break_sentences
    assert sentence.isprintable() and len(sentence) < 1000
    write_lines(tmp_path, [run_line(), train(1, 0.0), line | {"series": "train"}, train(2, 0.0)])
    with pytest.raises(RunError, match="line 3 is damaged"):
        read_run(tmp_path)


def test_limits_belong_to_the_last_start_until_a_break(tmp_path):
    start = {"kind": "run", "step": 0, "world": "shapes"}
    measured = {"kind": "limits", "step": 1, "perfect": {"total": 2.0}, "vae_floor": None}
    write_lines(tmp_path, [start, train(1, 0.0), measured, {**start, "step": 1}])
    run = read_run(tmp_path)
    assert run.head == {**start, "step": 1, "perfect": {"total": 2.0}, "vae_floor": None}
    assert run.until(1).head == run.head and column(run.full_lines, "step").tolist() == [1]
    write_lines(tmp_path, [start, measured, start, broken(1, "train")])
    assert read_run(tmp_path).head == start


def test_null_and_missing_values_are_nan(tmp_path):
    write_lines(tmp_path, [train(1, None), train(2, 0.5), {"kind": "train", "step": 3}])
    run = read_run(tmp_path)
    assert np.array_equal(
        column(run.full_lines, "reward/total"), [np.nan, 0.5, np.nan], equal_nan=True
    )
    assert run.has("reward/total")
    assert not run.has("kl/anchor")
    assert run.grid("grad_v").shape == (3, 0)


def test_per_step_metrics_are_a_grid(tmp_path):
    lines = [train(step, 0.0) | {"per_step": {"grad_v": [step, None]}} for step in (1, 2)]
    write_lines(tmp_path, [*lines, train(3, 0.0)])
    expected = [[1, np.nan], [2, np.nan], [np.nan, np.nan]]
    assert np.array_equal(read_run(tmp_path).grid("grad_v"), expected, equal_nan=True)


@pytest.mark.parametrize("value", ["0.5", [0.5], {"a": 1}])
def test_what_is_no_number_is_named(tmp_path, value):
    write_lines(
        tmp_path,
        [train(1, value) | {"per_step": {"grad_v": value, "kl_anchor": [value]}}, train(2, 0.5)],
    )
    run = read_run(tmp_path)
    with pytest.raises(RunError, match=r"reward/total is .*; a number is expected"):
        column(run.full_lines, "reward/total")
    with pytest.raises(RunError, match=r"kl_anchor is .*; a number is expected"):
        run.grid("kl_anchor")
    if value != [0.5]:
        with pytest.raises(RunError, match=r"grad_v is .*; a list of numbers is expected"):
            run.grid("grad_v")


def test_numbers_beyond_all_scales_are_missing(tmp_path):
    write_lines(
        tmp_path,
        [train(step, value) for step, value in enumerate((1e308, 10**400, float("-inf"), 1e30))],
    )
    assert np.array_equal(
        column(read_run(tmp_path).full_lines, "reward/total"), [np.nan] * 3 + [1e30], equal_nan=True
    )


def test_names_of_scores_come_from_the_file(tmp_path):
    line = train_line(1, np.random.default_rng(0)) | {"reward/OCR": 0.1}
    write_lines(tmp_path, [line])
    assert read_run(tmp_path).scores == ["VQ", "MQ", "TA", "OCR"]


@pytest.mark.parametrize(
    "tail", [b'{"kind": "train", "st', b'{"kind": "train"}', '{"prompt": "é'.encode()[:-1]]
)
def test_an_unfinished_last_line_is_left_out(tmp_path, tail):
    write_lines(tmp_path, [train(1, 0.0)])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    assert column(read_run(tmp_path).full_lines, "step").tolist() == [1]


@pytest.mark.parametrize("damage", [
    '{"kind": "train", "st', "[]", '{"kind": "train"}', '{"kind": "lunch", "step": 1}', "", "[" * 99999, "3", "null",
    '{"kind": ["train"], "step": 1}', '{"kind": "train", "step": "1"}', '{"kind": "train", "step": [1]}',
    '{"kind": "run", "step": 0, "versions": 3}', '{"kind": "run", "step": 0, "ranks": "many"}',
    '{"kind": "train", "step": 1, "per_step": []}', '{"kind": "train", "step": 1e999}',
])  # fmt: skip
def test_a_damaged_line_is_named(tmp_path, damage):
    good = json.dumps(train(1, 0.0))
    (tmp_path / "metrics.jsonl").write_text(f"{good}\n{damage}\n{good}\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2 is damaged"):
        read_run(tmp_path)


def test_a_run_without_lines_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match="holds no metrics yet"):
        read_run(tmp_path)


def test_an_error_about_numbers_names_the_run(tmp_path):
    for error in (ValueError("math domain error"), OverflowError("too large")):
        with pytest.raises(RunError, match=f"{tmp_path} holds values .*{error}"), about(tmp_path):
            raise error
    with pytest.raises(RunError, match=r"^a sentence$"), about(tmp_path):
        raise RunError("a sentence")


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml"])
def test_no_link_of_a_run_is_read(tmp_path, name):
    folder = make_run(tmp_path / "run", iterations=2, every=2, prompts=3)
    (folder / name).rename(tmp_path / "secret")
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=f"{name} is a link"):
        Case(read_run(folder))


def test_a_schedule_of_unequal_lengths_is_measured_nowhere(tmp_path):
    folder = make_run(tmp_path / "run", iterations=2, every=2, prompts=3)
    lines = read_lines(folder)
    lines[0]["schedule"]["equalizer"].pop()
    write_lines(folder, lines)
    assert math.isnan(Case(read_run(folder)).kl_pull)
