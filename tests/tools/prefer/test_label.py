"""From runs, checkpoints and folders of clips to a study: what is sampled, paired and stored."""

import json
import re
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
import yaml

from sage_grpo.runs.history import RunError
from sage_grpo.tools.gate import build_server
from sage_grpo.tools.prefer import label as label_module
from sage_grpo.tools.prefer.__main__ import config_file, main, parse_arguments
from sage_grpo.tools.prefer.answers import locked_clips, read_answers
from sage_grpo.tools.prefer.label import open_study
from sage_grpo.tools.prefer.study import StudyError, clip_path
from tests.smallest_run import PROMPTS, command_line
from tests.tools.prefer.studies import SIDE, Browser, encoded, new_study

# imageio's reader leaves the pipes of its ffmpeg process to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


def write_generated(folder, system, prompts=("a", "b", "c"), numbers=1, **extra):
    """A folder of clips as generate.py writes it."""
    folder.mkdir(parents=True)
    for place, prompt in enumerate(prompts):
        for number in range(numbers):
            stem = folder / f"{place:04d}-abcdef-42-{number}"
            stem.with_suffix(".mp4").write_bytes(encoded(system, place * 10 + number))
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

    # continued: no pair is drawn again, and the sources may be left out
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
    study = study_of(*words, "--validation_prompts", flags["validation_prompts"])
    assert f"settings come from {run}/config.yaml" in capsys.readouterr().out
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


def test_clips_and_scores_of_an_earlier_attempt_are_not_part_of_the_study(flags, quick, tmp_path):
    output = tmp_path / "prefs.jsonl"
    names = ("reward_model", "output_dir")
    rest = command_line({name: value for name, value in flags.items() if name not in names})
    words = (flags["pretrained_model_root"], "--output", output, *rest)
    study_of(*words, "--active", "shapes", "--seeds", 1, 2)
    output.unlink()  # as if it had been killed before it wrote the study
    study = study_of(*words, "--active", "motion", "--seeds", 2, 3)
    assert {clip.seed for clip in study.clips} == {2, 3}
    (name,) = set(study.clips[-1].scores) & set.intersection(*map(set, scores_of(study)))
    gaps = [abs(study.clips[a].scores[name] - study.clips[b].scores[name]) for a, b in study.pairs]
    assert gaps == sorted(gaps)


def scores_of(study):
    return [clip.scores for clip in study.clips]


def test_a_second_call_does_not_disturb_one_that_makes_the_study(tmp_path):
    ours = write_generated(tmp_path / "ours", 0)
    theirs = write_generated(tmp_path / "theirs", 1)
    output = tmp_path / "prefs.jsonl"
    with locked_clips(output) as folder:
        with pytest.raises(StudyError, match="in use by another"):
            study_of(ours, theirs, "--output", output)
        assert not list(folder.glob("*.mp4"))
    assert len(study_of(ours, theirs, "--output", output).pairs) == 3


def test_a_folder_from_others_names_no_clip_outside_of_it(tmp_path):
    ours = write_generated(tmp_path / "ours", 0)
    private = tmp_path / "private.mp4"
    shutil.copy(next(ours.glob("*.mp4")), private)
    theirs = write_generated(tmp_path / "theirs", 1, file=str(private))
    with pytest.raises(RunError, match="does not lie beside"):
        study_of(ours, theirs, "--output", tmp_path / "prefs.jsonl")


def test_a_run_names_no_paths_but_those_of_weights_and_other_folders_no_settings(tmp_path):
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    (tmp_path / "model").mkdir()
    values = {
        "pretrained_model_root": "some/model",
        "reward_path": "some/reward",
        "validation_prompts": ["private.txt"],
        "prompt_cache": "cache",
        "judge_rubric": "private.txt",
        "judge_cache": "cache",
        "fps": 5,
    }
    for folder in (run, tmp_path, tmp_path / "model"):
        (folder / "config.yaml").write_text(yaml.safe_dump(values))
    words = ["--output", "x.jsonl", "--prompt_cache", "mine"]
    for source in (run, checkpoint):
        _, (options, config) = parse_arguments(["label", str(source), *words])
        assert options.config_file == run / "config.yaml"
        assert (config.pretrained_model_root, config.reward_path) == ("some/model", "some/reward")
        assert (config.fps, config.prompt_cache) == (5, "mine")
        assert config.validation_prompts is config.judge_rubric is config.judge_cache is None
    _, (_, config) = parse_arguments(
        ["label", str(run), "--output", "x.jsonl", "--config", str(run / "config.yaml")]
    )
    assert (config.prompt_cache, config.judge_rubric) == ("cache", "private.txt")
    for source in (tmp_path / "model", checkpoint / "transformer", run / "checkpoints", "none"):
        assert config_file([Path(source)]) is None


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_port_in_use_is_noticed_before_anything_is_sampled(tmp_path):
    ours = write_generated(tmp_path / "ours", 0)
    theirs = write_generated(tmp_path / "theirs", 1)
    words = ["label", str(ours), str(theirs), "--output", str(tmp_path / "prefs.jsonl"), "--port"]
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(SystemExit):
        main([*words, str(other.getsockname()[1])])
    assert {path.name for path in tmp_path.iterdir()} == {"ours", "theirs"}


def test_the_page_of_a_new_study_is_served_at_the_printed_address(tmp_path, monkeypatch, capsys):
    ours = write_generated(tmp_path / "ours", 0)
    theirs = write_generated(tmp_path / "theirs", 1)
    output = tmp_path / "prefs.jsonl"
    servers = []

    def build_and_keep(app, port):
        servers.append(build_server(app, port))
        return servers[-1]

    monkeypatch.setattr(label_module, "build_server", build_and_keep)
    words = ["label", str(ours), str(theirs), "--output", str(output), "--port", "0"]
    thread = threading.Thread(target=main, args=(words,), daemon=True)
    thread.start()
    while thread.is_alive() and not (servers and servers[0].started):
        time.sleep(0.01)
    address = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", capsys.readouterr().out)[0]
    browser = Browser(address)
    assert browser.answer(0, overall="left").status_code == 200
    servers[0].should_exit = True
    thread.join()
    study, answers = read_answers(output)
    assert len(answers) == 1
    assert len(study.secret) == 32
    assert study.secret not in address


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
    (["label", "a", "--output", "x.json"], "does not end in .jsonl"),
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
