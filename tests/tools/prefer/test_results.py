"""The result of a study: numbers, page, JSON, and where a run shows it."""

import json
import os
import re
import shutil
from contextlib import suppress

import pytest

from sage_grpo.runs import card
from sage_grpo.runs.history import RunError, RunHistory
from sage_grpo.runs.preferences import read_preferences
from sage_grpo.tools.prefer.__main__ import main
from sage_grpo.tools.prefer.answers import Answer, AnswersFile
from sage_grpo.tools.prefer.results import (
    contradictions,
    disagreements,
    disputed,
    reward_agreement,
    summarize,
)
from sage_grpo.tools.prefer.study import Study, StudyClip, clips_folder
from sage_grpo.tools.report.page import preference_rows
from tests.tools.prefer.studies import PREFERS, SYSTEMS, answer_all, new_study


def abstract_study(prompts=40, **changes):
    """Two systems; VQ prefers the second, TA neither."""
    clips = [
        StudyClip(
            f"{system}{i}.mp4",
            system,
            f"prompt {i}",
            scores={"VQ": float(system), "TA": i % 3 - system * (i % 2)},
        )
        for i in range(prompts)
        for system in (0, 1)
    ]
    pairs = tuple((2 * i, 2 * i + 1) for i in range(prompts))
    return Study(SYSTEMS, ("overall",), tuple(clips), pairs, **changes)


@pytest.fixture
def file(tmp_path):
    opened = AnswersFile(tmp_path / "prefs.jsonl", abstract_study(repeat=0.25))
    clips_folder(opened.path).mkdir()
    for clip in opened.study.clips:
        (clips_folder(opened.path) / clip.file).touch()
    yield opened
    opened.close()


def test_a_clear_winner_is_found_whatever_the_sides(file):
    answer_all(file, "ann", lambda pair, left: "tie" if pair < 8 else PREFERS[left == 1])
    answer_all(file, "bob", lambda pair, left: "bad" if pair < 4 else PREFERS[left == 1])
    record = summarize(file.study, [a for given in file.answers.values() for a in given.values()])
    (row,) = record["questions"]["overall"]["comparisons"]
    assert (row["system"], row["other"]) == (SYSTEMS[1], SYSTEMS[0])
    assert row["losses"] == 0
    assert row["wins"] + row["ties"] + row["both_bad"] == 100
    assert row["both_bad"] >= 4
    assert 0.85 < row["win_rate"]["mean"] < 1
    assert row["decided"]
    assert row["more_prompts"] == 0
    assert record["questions"]["overall"]["alpha"] > 0.3
    assert record["questions"]["overall"]["rewards"]["VQ"]["mean"] == 1.0
    for figures in record["raters"].values():
        assert (figures["answers"], figures["consistency"]["count"]) == (50, 10)
        assert figures["consistency"]["mean"] == 1.0
        assert 0.2 < figures["left"] < 0.8


def test_a_rater_who_always_presses_left_decides_nothing_and_is_noticed(file):
    answer_all(file, "ann", lambda pair, left: "left")
    record = summarize(file.study, list(file.of("ann").values()))
    (row,) = record["questions"]["overall"]["comparisons"]
    assert not row["decided"]
    assert record["raters"]["ann"]["left"] == 1.0
    assert record["raters"]["ann"]["consistency"]["mean"] == 0.0


def test_pairs_are_disputed_if_raters_or_rewards_contradict(file):
    answer_all(file, "ann", lambda pair, left: PREFERS[left == 1])
    answer_all(file, "bob", lambda pair, left: PREFERS[(left == 1) == (pair != 7)])
    answers = [a for given in file.answers.values() for a in given.values()]
    shown = disputed(file.study, answers, file.path)
    assert shown[0].prompt == "prompt 7"
    assert "Raters disagree" in shown[0].reason
    assert any("TA the other one" in pair.reason for pair in shown[1:])

    (clips_folder(file.path) / shown[0].clips[1].path.name).unlink()
    assert "prompt 7" not in [pair.prompt for pair in disputed(file.study, answers, file.path)]


def answer(rater="ann", pair=0, repeat=False, **choices):
    return Answer(rater, 0, pair, False, repeat, choices)


QUESTIONS = ("vq", "mq", "ta")


@pytest.mark.parametrize("answers, counts", [
    ([answer(vq="left", mq="right", ta="tie")], None),
    ([answer(vq="left", mq="left", ta="left"), answer(vq="right", mq="right", ta="tie", repeat=True)], None),
    ([answer(vq="left", mq="right", ta="tie"), answer("bob", vq="left", mq="left", ta="tie")], "(mq): 1 prefer"),
], ids=["three questions", "a second showing", "two raters"])  # fmt: skip
def test_only_raters_disagree_and_about_one_question(answers, counts):
    study = Study(
        SYSTEMS, QUESTIONS, (StudyClip("a.mp4", 0, "p"), StudyClip("b.mp4", 1, "p")), ((0, 1),)
    )
    found = disagreements(study, answers)
    assert [counts in reason for _, reason in found] == ([] if counts is None else [True])


def test_a_clip_without_a_score_costs_its_pair_and_not_the_reward():
    scores = [{}, {"VQ": 2.0}, {"VQ": 1.0}, {"VQ": 2.0}, {"VQ": 1.0}, {"VQ": 3.0}]
    clips = [
        StudyClip(f"{i}.mp4", i % 2, str(i // 2), scores=each) for i, each in enumerate(scores)
    ]
    study = Study(SYSTEMS, ("overall",), tuple(clips), ((0, 1), (2, 3), (4, 5)))
    answers = [
        answer(pair=pair, overall=side) for pair, side in enumerate(["left", "left", "right"])
    ]
    agreement = reward_agreement(study, answers, "overall")
    assert (agreement["VQ"]["count"], agreement["VQ"]["mean"]) == (2, 0.5)
    assert [pair for pair, _ in contradictions(study, answers)] == [1]


def test_a_study_without_its_clips_has_a_page_of_numbers(tmp_path, capsys):
    file = new_study(tmp_path / "prefs.jsonl")
    answer_all(file, "ann", lambda pair, left: PREFERS[left == 1])
    answer_all(file, "bob", lambda pair, left: PREFERS[left == 0])
    file.close()
    shutil.rmtree(clips_folder(file.path))
    assert main(["result", str(file.path)]) == 0
    assert "more prompts needed" in capsys.readouterr().out
    page = (tmp_path / "prefs.html").read_text()
    assert "Win rates" in page
    assert "Disputed" not in page


def test_the_page_and_its_json(tmp_path, capsys):
    hostile = "<script>alert(1)</script>"
    file = new_study(tmp_path / "preferences.jsonl", prompts=(hostile, "b", "c", "d"))
    answer_all(file, "<b>ann</b>", lambda pair, left: PREFERS[left == 1])
    answer_all(
        file, "bob\N{RIGHT-TO-LEFT MARK}"[:3], lambda pair, left: PREFERS[left == (pair > 0)]
    )
    file.close()
    assert main(["result", str(file.path)]) == 0
    page = (tmp_path / "preferences.html").read_text()
    record = json.loads((tmp_path / "preferences.json").read_text())
    assert record["answers"] == 8
    assert "<script" not in page
    assert "<b>ann" not in page
    assert page.count("data:video/mp4;base64,") >= 2
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert SYSTEMS[1] in capsys.readouterr().out

    (row,) = read_preferences(tmp_path)
    assert (row.system, row.raters, row.answers) == (SYSTEMS[1], 2, 8)


def test_a_result_replaces_no_other_file_and_writes_through_no_link(tmp_path, capsys):
    file = new_study(tmp_path / "prefs.jsonl")
    answer_all(file, "ann", lambda pair, left: "left")
    file.close()
    answers = file.path.read_bytes()
    for name in ("prefs.json", "prefs.html", "prefs"):
        (tmp_path / name).write_bytes(answers)
    for words in (
        ["prefs.json"],
        ["prefs.html"],
        ["prefs"],
        ["prefs.jsonl", "--output", "prefs.jsonl"],
        ["prefs.jsonl", "--output", "prefs.json"],
        ["prefs.jsonl", "--output", "x.json"],
    ):
        places = [word if word == "--output" else str(tmp_path / word) for word in words]
        with pytest.raises(SystemExit) as stop:
            main(["result", *places])
        assert stop.value.code == 2
        assert "does not end in" in capsys.readouterr().err
    for name in ("prefs.jsonl", "prefs.json", "prefs.html", "prefs"):
        assert (tmp_path / name).read_bytes() == answers

    private = tmp_path / "private"
    private.write_text("mine")
    for suffix in (".html", ".json"):
        file.path.with_suffix(suffix).unlink()
        file.path.with_suffix(suffix).symlink_to(private)
    assert main(["result", str(file.path)]) == 0
    assert private.read_text() == "mine"


def test_a_page_shows_no_clip_that_is_a_pipe_or_lies_behind_a_link(tmp_path):
    file = new_study(tmp_path / "prefs.jsonl")
    for rater, choice in (("ann", "left"), ("bob", "right")):
        answer_all(file, rater, lambda pair, left, choice=choice: choice)
    file.close()
    folder = tmp_path / "prefs.clips"
    for clip in folder.iterdir():
        clip.unlink()
        os.mkfifo(clip)
    assert shows_no_clip(file.path)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to("elsewhere")
    assert shows_no_clip(file.path)


def shows_no_clip(answers):
    """Whether `result` ends, with a page or without one, and no clip is on it."""
    with suppress(SystemExit):
        main(["result", str(answers)])
    page = answers.with_suffix(".html")
    return not page.exists() or "data:video" not in page.read_text()


def test_there_is_no_result_without_answers(tmp_path, capsys):
    AnswersFile(tmp_path / "prefs.jsonl", abstract_study()).close()
    with pytest.raises(SystemExit) as stop:
        main(["result", str(tmp_path / "prefs.jsonl")])
    assert stop.value.code == 2
    assert "no answers yet" in capsys.readouterr().err


# where a run shows it

RECORD = {
    "kind": "preferences",
    "raters": {"ann": {}, "bob": {}},
    "questions": {
        "overall": {
            "comparisons": [
                {
                    "system": "step-000080|x",
                    "other": "base",
                    "win_rate": {"mean": 0.72, "low": 0.61, "high": 0.81, "count": 128},
                }
            ]
        }
    },
}


@pytest.fixture
def run(tmp_path):
    return RunHistory(tmp_path, [], [], [])


def test_report_and_card_show_a_study_of_the_run(run):
    recipe = {"pretrained_model_root": "assets/tiny", "use_lora": False}
    about = {"step": 3, "reward": "1 VQ", "base": "abc"}
    assert preference_rows(run) == []
    assert "blind" not in card.model_card(recipe, run, **about)["README.md"]

    (run.folder / "preferences.json").write_text(json.dumps(RECORD))
    text = "72% (61% to 81%) of 128 answers by 2 raters"
    assert preference_rows(run)[1] == ["step-000080|x against base", "overall", text]
    readme = card.model_card(recipe, run, **about)["README.md"]
    assert f"| step-000080\\|x against base | overall | {text} |" in readme


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"kind": "preferences"}', "{", '{"kind": "run", "raters": {}}']
)
def test_a_damaged_study_is_named_by_the_report_and_left_out_of_the_card(run, text):
    (run.folder / "preferences.json").write_text(text)
    with pytest.raises((RunError, ValueError), match=r"preferences\.json"):
        preference_rows(run)
    recipe = {"pretrained_model_root": "assets/tiny", "use_lora": False}
    assert "blind" not in card.model_card(recipe, run, step=3, reward="r", base="b")["README.md"]
