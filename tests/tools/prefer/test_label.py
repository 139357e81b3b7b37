"""From runs, checkpoints and folders of clips to a study: what is sampled, paired and stored."""

import json
import socket
from pathlib import Path

import pytest

from sage_grpo.runs.media import write_mp4
from sage_grpo.tools.prefer.__main__ import config_file, main, parse_arguments
from sage_grpo.tools.prefer.answers import read_answers
from sage_grpo.tools.prefer.label import open_study
from sage_grpo.tools.prefer.study import StudyError, clip_path
from tests.smallest_run import PROMPTS, command_line
from tests.tools.prefer.studies import SIDE, draw_clip, new_study

# imageio's reader leaves the pipes of its ffmpeg process to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


def write_generated(folder, system, prompts=("a", "b", "c"), numbers=1, **extra):
    """A folder of clips as generate.py writes it."""
    folder.mkdir(parents=True)
    for place, prompt in enumerate(prompts):
        for number in range(numbers):
            stem = folder / f"{place:04d}-abcdef-42-{number}"
            write_mp4(stem.with_suffix(".mp4"), draw_clip(system, place * 10 + number), 8)
            record = {"prompt": prompt, "seed": 42, "number": number, "height": SIDE, "width": SIDE}
            record["scores"] = {"VQ": float(place * 10 + number**2)}
            stem.with_suffix(".json").write_text(json.dumps(record | extra))
    return folder


def study_of(*words):
    """Make or continue the study of a command line."""
    _, (options, config) = parse_arguments(["label", *map(str, words)])
    file = open_study(options, config)
    file.close()
    return file.study


def test_two_folders_of_clips_are_paired_by_prompt_and_number(tmp_path):
    ours = write_generated(tmp_path / "ours", 0, numbers=2)
    theirs = write_generated(tmp_path / "theirs", 1, ("c", "b", "x"), numbers=2)
    output = tmp_path / "prefs.jsonl"
    study = study_of(ours, theirs, "--output", output, "--repeat", "0.5", "--questions", "vq,ta")
    assert [name.rpartition("-")[2] for name in study.systems] == ["ours", "theirs"]
    assert (study.questions, study.repeat, study.ordered) == (("vq", "ta"), 0.5, False)
    # prompts b and c have two clips each; files of the second folder are in another order
    seen = sorted(
        (study.prompt(pair), study.clips[a].number) for pair, (a, _) in enumerate(study.pairs)
    )
    assert seen == [("b", 0), ("b", 1), ("c", 0), ("c", 1)]
    for a, b in study.pairs:
        assert study.clips[a].system != study.clips[b].system
        assert study.clips[a].number == study.clips[b].number
    assert len({clip.file for clip in study.clips}) == 8
    assert all(clip_path(output, clip).is_file() for clip in study.clips)
    assert all((clip.height, "VQ" in clip.scores) == (SIDE, True) for clip in study.clips)

    # continued: nothing is drawn anew, sources may be left out
    assert study_of("--output", output, "--questions", "vq,ta") == study
    with pytest.raises(StudyError, match="asks vq,ta, not overall"):
        study_of("--output", output)


def test_pairs_of_one_folder(tmp_path):
    folder = write_generated(tmp_path / "clips", 0, numbers=3)
    study = study_of(folder, "--output", tmp_path / "prefs.jsonl", "--pairs", "6")
    assert len(study.pairs) == 6
    for a, b in study.pairs:
        assert study.clips[a].prompt == study.clips[b].prompt
        assert study.clips[a].number != study.clips[b].number


def test_the_base_model_and_a_run_are_sampled_first(flags, make, tmp_path, capsys):
    make(save_interval=1, holdout_reward="motion").train()
    run = flags["output_dir"]
    assert str(config_file([Path(run)])) == f"{run}/config.yaml"
    assert str(config_file([Path(run) / "checkpoints" / "step-000002"])) == f"{run}/config.yaml"
    clips = write_generated(Path(run) / "validation" / "step-000009", 0)
    assert config_file([clips]) is None
    output = tmp_path / "prefs.jsonl"
    words = (flags["pretrained_model_root"], run, "--output", output)
    study = study_of(*words)
    assert study.systems == ("base", "run-step-000002")
    assert sorted(study.prompt(pair) for pair in range(3)) == sorted(PROMPTS)
    assert len(study.pairs) == 3
    assert {clip.height for clip in study.clips} == {16}
    assert all({"VQ", "MQ", "TA"} <= set(clip.scores) for clip in study.clips)
    sampled = sorted((tmp_path / "prefs.clips" / "sampled").glob("*/*.mp4"))
    assert len(sampled) == 6
    _, answers = read_answers(output)
    assert answers == []


def test_pairs_of_which_the_reward_is_unsure_come_first(flags, quick, tmp_path):
    model = flags["pretrained_model_root"]
    words = (model, "--output", tmp_path / "prefs.jsonl", "--active", "shapes", "--seeds", 1, 2, 3)
    names = ("reward_model", "output_dir")
    rest = command_line({name: value for name, value in flags.items() if name not in names})
    study = study_of(*words, "--pairs", 5, *rest)
    assert study.ordered
    gaps = [abs(total(study.clips[a]) - total(study.clips[b])) for a, b in study.pairs]
    assert gaps == sorted(gaps)
    assert len(gaps) == 5


def total(clip):
    return sum(clip.scores.values())


@pytest.mark.parametrize("port", ["taken", 99999, -5])
def test_a_port_that_cannot_be_used_is_one_sentence(tmp_path, port, capfd):
    output = str(tmp_path / "prefs.jsonl")
    new_study(tmp_path / "prefs.jsonl").close()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1] if port == "taken" else port
        with pytest.raises(SystemExit) as stop:
            main(["label", "--output", output, f"--port={port}"])
    assert stop.value.code == 2
    assert capfd.readouterr().err.endswith(f"port {port} cannot be used; give another --port\n")


@pytest.mark.parametrize("words, message", [
    (["label", "--output", "FOLDER/new.jsonl"], "name what to compare"),
    (["label", "nowhere", "--output", "FOLDER/new.jsonl"], "nowhere does not exist"),
    (["label", "a", "--output", "x.jsonl", "--questions", "beauty"], "is not overall, or some of"),
    (["label", "a", "--output", "x.jsonl", "--repeat", "2"], "is not a share"),
    (["label", "a", "--output", "x.jsonl", "--pairs", "0"], "must be above 0"),
    (["label", "a", "--output", "x.jsonl", "--raters", "ann", "ann"], "two raters have the same name"),
    (["label", "a"], "--output"),
    (["vote"], "unknown command vote"),
    (["result", "nowhere.jsonl"], "does not exist"),
    (["learn", "nowhere.jsonl", "--base", "b", "--output", "o"], "does not exist"),
])  # fmt: skip
def test_wrong_input_is_answered_with_one_sentence(tmp_path, capsys, words, message):
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
