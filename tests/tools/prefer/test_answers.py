"""The answers file: nothing confirmed is lost, damage is found, one server at a time."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from sage_grpo.tools.prefer import answers as answers_module
from sage_grpo.tools.prefer import study as study_module
from sage_grpo.tools.prefer.answers import Answer, AnswersFile, read_answers
from sage_grpo.tools.prefer.pairs import Trial
from sage_grpo.tools.prefer.study import (
    Study,
    StudyClip,
    StudyError,
    clip_path,
    clips_folder,
    from_record,
    read_clip,
    to_record,
)

CLIPS = tuple(
    StudyClip(f"{i}.mp4", i % 2, f"prompt {i // 2}", scores={"VQ": 0.5}) for i in range(4)
)
STUDY = Study(("a", "b"), ("overall",), CLIPS, ((0, 1), (2, 3)), repeat=0.5, seed=3, ordered=True)
TRIAL = Trial(1, swapped=True)


@pytest.fixture
def path(tmp_path):
    AnswersFile(tmp_path / "prefs.jsonl", STUDY).close()
    return tmp_path / "prefs.jsonl"


def choices(path):
    return [answer.choices["overall"] for answer in read_answers(path)[1]]


def test_what_is_written_is_read_back(path):
    file = AnswersFile(path)
    file.add("ann", 0, TRIAL, {"overall": "left"}, 2.25)
    file.add("bob", 0, Trial(0, False, True), {"overall": "bad"}, 1.0)
    file.close()
    study, answers = read_answers(path)
    assert study == STUDY
    assert answers == [
        Answer("ann", 0, 1, True, False, {"overall": "left"}, 2.25),
        Answer("bob", 0, 0, False, True, {"overall": "bad"}, 1.0),
    ]


@pytest.mark.parametrize("choice, swapped, outcome", [
    ("left", False, 1.0), ("right", False, 0.0), ("left", True, 0.0), ("right", True, 1.0),
    ("tie", False, 0.5), ("tie", True, 0.5), ("bad", True, 0.5),
])  # fmt: skip
def test_an_outcome_is_about_the_pairs_first_clip(choice, swapped, outcome):
    assert Answer("ann", 0, 0, swapped, False, {"overall": choice}).outcome("overall") == outcome


def test_undo_takes_back_the_raters_own_last_answer(path):
    file = AnswersFile(path)
    assert not file.undo("ann")
    file.add("ann", 0, TRIAL, {"overall": "left"}, 1)
    file.add("bob", 0, TRIAL, {"overall": "right"}, 1)
    assert file.undo("ann")
    assert file.of("ann") == {}
    file.add("ann", 0, TRIAL, {"overall": "tie"}, 1)
    file.close()
    assert choices(path) == ["right", "tie"]
    assert len(path.read_text().splitlines()) == 5  # nothing is rewritten


@pytest.mark.parametrize("half", [b'{"kind": "answer", "rater": "an', b"{", b"\xff\xfe"])
def test_a_half_written_line_at_the_end_is_cut_off(path, half):
    file = AnswersFile(path)
    file.add("ann", 0, TRIAL, {"overall": "left"}, 1)
    file.close()
    complete = path.read_bytes()
    path.write_bytes(complete + half)
    assert choices(path) == ["left"]

    again = AnswersFile(path)
    assert again.cut_bytes == len(half)
    again.add("ann", 1, TRIAL, {"overall": "tie"}, 1)
    again.close()
    assert path.read_bytes().startswith(complete + b'{"kind": "answer"')
    assert choices(path) == ["left", "tie"]


@pytest.mark.parametrize("lines", [1, 2])
def test_a_last_line_that_lacks_only_its_newline_is_kept(path, lines):
    if lines == 2:
        file = AnswersFile(path)
        file.add("ann", 0, TRIAL, {"overall": "left"}, 1)
        file.close()
    given = choices(path)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert choices(path) == given
    file = AnswersFile(path)
    assert file.cut_bytes == 0
    file.add("ann", 1, TRIAL, {"overall": "tie"}, 1)
    file.close()
    assert choices(path) == [*given, "tie"]


@pytest.mark.parametrize("happens", ["replaced", "moved"])
def test_no_answer_is_confirmed_that_goes_to_another_file_than_the_named_one(path, happens):
    file = AnswersFile(path)
    file.add("ann", 0, TRIAL, {"overall": "left"}, 1)
    saved = path.with_name("saved")
    saved.write_bytes(path.read_bytes())
    if happens == "replaced":  # as editors save
        os.replace(saved, path)
    else:
        path.rename(saved)
    with pytest.raises(OSError):
        file.add("ann", 1, TRIAL, {"overall": "tie"}, 1)
    with pytest.raises(OSError):
        file.undo("ann")
    assert list(file.of("ann")) == [0]
    file.close()
    assert choices(path if happens == "replaced" else saved) == ["left"]


@pytest.mark.parametrize("line", [
    "{", "[]", '{"kind": "vote"}', '{"kind": "answer"}',
    '{"kind": "answer", "rater": "a", "trial": 0, "pair": 2, "answers": {"overall": "left"}}',
    '{"kind": "answer", "rater": "a", "trial": 0, "pair": 0, "answers": {"overall": "best"}}',
    '{"kind": "answer", "rater": "a", "trial": 0, "pair": 0, "answers": {"vq": "left"}}',
    '{"kind": "answer", "rater": "a\\u001b", "trial": 0, "pair": 0, "answers": {"overall": "left"}}',
    '{"kind": "answer", "rater": "a\\ud800", "trial": 0, "pair": 0, "answers": {"overall": "left"}}',
    '{"kind": "answer", "rater": "a", "trial": 0, "pair": 0, "answers": {"overall": "left"}, "seconds": HUGE}',
    '{"kind": "answer", "rater": "a", "trial": 0, "pair": 0, "answers": {"overall": "left"}, "seconds": NaN}',
    '{"kind": "undo", "rater": [], "trial": 0}', '{"kind": "undo", "rater": "a", "trial": {}}',
])  # fmt: skip
def test_damage_elsewhere_is_reported_with_its_line(path, line):
    line = line.replace("HUGE", str(10**400))
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(StudyError, match=r"line 2|a rater is called"):
        read_answers(path)
    with pytest.raises(StudyError):
        AnswersFile(path)
    path.write_text(path.read_text().rpartition(line)[0])
    AnswersFile(path).close()  # the failed attempt holds no lock


def test_a_second_server_is_refused_and_a_killed_one_is_not_in_the_way(path):
    code = (
        "import sys, time; from pathlib import Path; from sage_grpo.tools.prefer.answers import AnswersFile, Trial;"
        "f = AnswersFile(Path(sys.argv[1])); f.add('ann', 0, Trial(0, False), {'overall': 'left'}, 1);"
        "print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        with pytest.raises(StudyError, match="in use by another"):
            AnswersFile(path)
        assert choices(path) == ["left"]  # reading needs no lock
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    AnswersFile(path).close()
    assert choices(path) == ["left"]


def test_an_answer_is_synced_before_it_counts(path, monkeypatch):
    file = AnswersFile(path)

    def full_disk(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(answers_module.os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space"):
            file.add("ann", 0, TRIAL, {"overall": "left"}, 1)
    assert file.of("ann") == {}
    assert choices(path) == []
    file.add("ann", 0, TRIAL, {"overall": "right"}, 1)
    file.close()
    assert choices(path) == ["right"]


def test_a_new_study_replaces_no_file(path):
    before = path.read_bytes()
    with pytest.raises(StudyError, match="exists already"):
        AnswersFile(path, STUDY)
    assert path.read_bytes() == before
    assert [place.name for place in path.parent.iterdir()] == [path.name]


def test_a_new_study_leaves_files_beside_it_alone(tmp_path):
    (tmp_path / "private").write_text("mine")
    (tmp_path / "a.jsonl.new").write_text("mine")
    (tmp_path / "b.jsonl.new").symlink_to("private")
    for name in ("a.jsonl", "b.jsonl"):
        AnswersFile(tmp_path / name, STUDY).close()
    assert {place.name for place in tmp_path.glob("*")} == {
        "private", "a.jsonl.new", "b.jsonl.new", "a.jsonl", "b.jsonl",
    }  # fmt: skip
    assert (tmp_path / "private").read_text() == (tmp_path / "a.jsonl.new").read_text() == "mine"


def test_a_study_that_could_not_be_read_back_is_not_written(tmp_path):
    with pytest.raises(StudyError, match="damaged study"):
        AnswersFile(tmp_path / "prefs.jsonl", replace(STUDY, systems=("a", "half \ud800")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [
    {"kind": "run"}, {"version": 2}, {"pairs": []}, {"pairs": [[0, 4]]}, {"pairs": [[1, 1]]}, {"pairs": [[0]]},
    {"systems": ["a"]}, {"questions": ["beauty"]}, {"questions": []}, {"repeat": 2}, {"clips": None}, {"seed": "x"},
    {"systems": "ab", "questions": [1]}, {"questions": ["overall", "overall"]}, {"secret": 5}, {"clips": [5]},
    {"systems": ["a", "half \ud800"]}, {"clips": [vars(CLIPS[0]) | {"prompt": "half \ud800"}] * 4},
    {"clips": [vars(CLIPS[0]) | {"scores": [1]}] * 4}, {"clips": [vars(CLIPS[0]) | {"scores": {"VQ": 1e300}}] * 4},
    {"clips": [vars(CLIPS[0]) | {"scores": {"VQ": 10**400}}] * 4},
])  # fmt: skip
def test_a_damaged_study_is_rejected(change):
    record = json.loads(json.dumps(to_record(STUDY)))
    assert from_record(record, "here") == STUDY
    with pytest.raises(StudyError, match="here"):
        from_record(record | change, "here")


def test_a_study_of_an_earlier_version_has_no_secret():
    record = to_record(STUDY)
    del record["secret"]
    assert from_record(record, "here") == STUDY


@pytest.mark.parametrize("kind", ["linked folder", "link", "pipe", "large"])
def test_only_regular_files_in_the_studys_own_folder_are_clips(path, kind, monkeypatch):
    private = path.with_name("private")
    private.mkdir()
    (private / "0.mp4").write_bytes(b"home video")
    folder = clips_folder(path)
    if kind == "linked folder":
        folder.symlink_to(private)
    else:
        folder.mkdir()
    if kind == "link":
        (folder / "0.mp4").symlink_to(private / "0.mp4")
    if kind == "pipe":
        os.mkfifo(folder / "0.mp4")
    if kind == "large":
        monkeypatch.setattr(study_module, "MAX_CLIP_BYTES", 3)
        (folder / "0.mp4").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"not followed|does not lie|not a regular|at most"):
        read_clip(path, CLIPS[0])


@pytest.mark.parametrize("name", ["../a.mp4", "/a.mp4", "a/b.mp4", "..", "", "prefs.jsonl"])
def test_a_clip_lies_in_the_studys_folder(path, name):
    with pytest.raises(ValueError, match=r"does not lie beside it|not an mp4"):
        clip_path(path, StudyClip(name, 0, "p"))
