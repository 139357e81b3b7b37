"""Evaluation on real tiny models: numbers, resuming, folders of clips, and two processes."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_grpo.config.fields import ConfigError
from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.rewards.registry import REWARDS
from sage_grpo.runs.media import write_mp4
from sage_grpo.tools import evaluate
from sage_grpo.worlds.shapes.scenes import captions, render, sample_scenes
from tests.dist import run_ranks
from tests.programs import exit_code
from tests.smallest_run import slow

ROOT = Path(__file__).parents[2]
TINY = ROOT / "assets" / "tiny"
PROMPTS = (
    "a red circle moving left",
    "a green square moving right",
    "a red square",
    "a green circle moving left",
)
# imageio's reader leaves the pipes of its ffmpeg process to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


class Level:
    """Mean of the pixels; it counts the clips that it sees, and fails for those in `bad`."""

    names = ("level",)
    seen = 0
    bad = ()
    weights = "first"

    def fingerprint(self):
        return {"weights": self.weights}

    def check(self, prompts):
        pass

    def score(self, clips, prompts, fps):
        Level.seen += len(clips)
        if set(prompts) & set(Level.bad):
            raise OSError("no more paper")
        return {"level": torch.stack([clip.double().mean() for clip in clips])}


@pytest.fixture
def level(monkeypatch):
    monkeypatch.setitem(REWARDS, "level", lambda setup: Level())
    monkeypatch.setattr(Level, "seen", 0)
    return Level


@pytest.fixture
def command(tiny_folder, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    flags = {
        "pretrained_model_root": tiny_folder, "validation_prompts": prompts, "validation_num_inference_steps": 2,
        "validate_video_length": 5, "validation_fixed_size": "16x16", "guidance_scale": 1.0, "reward_batch_size": 2,
        "output": tmp_path / "out",
    }  # fmt: skip

    def build(*extra, **changes):
        words = [
            word for name, value in (flags | changes).items() for word in (f"--{name}", str(value))
        ]
        return words + [str(word) for word in extra]

    return build


@pytest.fixture
def checkpoint(tiny_folder, tmp_path):
    """Weights that move every clip."""
    folder = tmp_path / "run" / "checkpoints" / "step-000007"
    shutil.copytree(tiny_folder / "transformer", folder / "transformer")
    file = next((folder / "transformer").glob("*.safetensors"))
    save_file({name: values * 1.3 for name, values in load_file(file).items()}, file)
    return folder


def result(tmp_path):
    return json.loads((tmp_path / "out" / "evaluation.json").read_text())


def records(tmp_path, system):
    return json.loads((tmp_path / "out" / system / "clips.json").read_text())


def levels(tmp_path, system):
    return torch.tensor(
        [r["scores"]["level.level"] for r in records(tmp_path, system)], dtype=torch.float64
    )


def test_base_against_checkpoint(command, checkpoint, tmp_path, level, capsys):
    words = command("--checkpoints", checkpoint, "--reward_model", "level", "shapes")
    assert evaluate.main(words) == 0 and level.seen == 8
    found = result(tmp_path)
    assert found["reference"] == "base" and list(found["systems"]) == ["base", "run-step-000007"]
    before, after = (levels(tmp_path, s) for s in found["systems"])
    column = found["systems"]["run-step-000007"]["columns"]["level"]
    assert column["mean"] == pytest.approx(after.mean().item()) and column["count"] == 4
    assert column["half"] == pytest.approx(3.182 * after.std().item() / 2, rel=0.01)
    gains = after - before
    assert column["difference"] == pytest.approx(gains.mean().item()) and gains.abs().min() > 0
    assert column["difference_half"] == pytest.approx(3.182 * gains.std().item() / 2, rel=0.01)
    assert column["win_rate"] == (gains > 0).double().mean()
    assert "win_rate" not in found["systems"]["base"]["columns"]["level"]
    shown = capsys.readouterr().out
    assert "Overall" in shown
    assert "run-step-000007 minus base" in shown
    assert "of 4, too few clips" in shown
    text = (tmp_path / "out" / "evaluation.md").read_text()
    titles = (
        "| mean ± 95 % | base, 4 clips | run-step-000007, 4 clips | run-step-000007 minus base |\n"
    )
    assert text.startswith(f"{titles}| --- | ---: | ---: | ---: |\n| Overall | ")
    assert text.endswith(" |\n")
    assert (tmp_path / "out" / "evaluation.html").read_text().count("<video") == 8


def test_two_runs_are_compared_with_each_other(command, checkpoint, tmp_path, level):
    """Runs stand for their newest checkpoints; the base model is not sampled."""
    other = tmp_path / "other"
    shutil.copytree(checkpoint.parent.parent, other)
    for file in (other / "checkpoints" / checkpoint.name / "transformer").glob("*.safetensors"):
        save_file({name: values * 0.9 for name, values in load_file(file).items()}, file)
    words = command("--reference", other, "--checkpoints", tmp_path / "run", reward_model="level")
    assert evaluate.main(words) == 0 and level.seen == 8
    found = result(tmp_path)
    names = [f"{run}-step-000007" for run in ("other", "run")]
    assert found["reference"] == names[0] and list(found["systems"]) == names
    before, after = ([r["scores"]["level"] for r in records(tmp_path, name)] for name in names)
    gains = torch.tensor(after, dtype=torch.float64) - torch.tensor(before, dtype=torch.float64)
    column = found["systems"][names[1]]["columns"]["level"]
    assert column["difference"] == pytest.approx(gains.mean().item()) and gains.abs().min() > 0


@pytest.mark.parametrize("flag", ["--checkpoints", "--reference"])
@pytest.mark.parametrize(
    "name, told",
    [("gone", "does not exist"), ("run", "holds no checkpoint"), ("empty", "has neither")],
)
def test_weights_that_are_not_there_are_named_before_anything_is_sampled(
    command, tmp_path, level, capsys, flag, name, told
):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    assert exit_code(evaluate.main, command(flag, tmp_path / name, reward_model="level")) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / name) in said and told in said
    assert level.seen == 0 and not (tmp_path / "out").exists()


def test_a_second_call_goes_on_where_the_first_ended(command, tmp_path, level, monkeypatch):
    words = command(reward_model="level")
    plain = Hunyuan15.decode
    made = []
    monkeypatch.setattr(
        Hunyuan15, "decode", lambda self, latents: made.append(1) or plain(self, latents)
    )
    assert evaluate.main(words) == 0 and len(made) == 4
    first = result(tmp_path)
    (tmp_path / "out" / "base" / records(tmp_path, "base")[1]["file"]).with_suffix(".json").unlink()
    assert evaluate.main(words) == 0 and len(made) == 5 and level.seen == 5
    assert result(tmp_path) == first
    # another reward needs the pixels again
    assert evaluate.main(command(reward_model="shapes")) == 0 and len(made) == 9
    assert evaluate.main(words) == 0 and len(made) == 9  # and old scores were kept
    level.bad = PROMPTS[:1]
    shutil.rmtree(tmp_path / "out")
    assert evaluate.main(words) == 1
    level.bad = ()
    failed = [r["scores"]["level"] is None for r in records(tmp_path, "base")]
    assert failed == [True, True, False, False]
    assert evaluate.main(words) == 0 and len(made) == 15 and result(tmp_path) == first


def test_clips_made_or_scored_in_another_way_are_not_mixed(
    command, checkpoint, tmp_path, level, monkeypatch, capsys
):
    words = command("--checkpoints", checkpoint, "--seeds", "3", reward_model="level")
    assert evaluate.main(words) == 0
    assert [r["seed"] for r in records(tmp_path, "base")] == [3] * 4
    other = command(reward_model="level", validation_num_inference_steps=3)
    assert exit_code(evaluate.main, other) == 2
    assert "validation_num_inference_steps 2, not 3; give another" in capsys.readouterr().err
    assert exit_code(evaluate.main, command(reward_model="level", validation_solver="dpm")) == 2
    assert "validation_solver euler, not dpm" in capsys.readouterr().err
    monkeypatch.setattr(Level, "weights", "second")
    assert exit_code(evaluate.main, words) == 2
    assert "reward level weights first, not second" in capsys.readouterr().err
    monkeypatch.setattr(Level, "weights", "first")
    monkeypatch.setitem(REWARDS, "brightness", lambda setup: Level())
    assert exit_code(evaluate.main, command(reward_model="brightness")) == 2
    assert "the score level of the reward level, not brightness" in capsys.readouterr().err
    os.utime(next((checkpoint / "transformer").glob("*.safetensors")), (1, 2e9))
    assert exit_code(evaluate.main, command("--checkpoints", checkpoint, reward_model="level")) == 2
    assert "weights of run-step-000007" in capsys.readouterr().err
    assert (
        exit_code(evaluate.main, command("--checkpoints", tmp_path / "none", reward_model="level"))
        == 2
    )
    assert "none does not exist" in capsys.readouterr().err


def test_a_guidance_for_a_second_transformer_that_is_not_there(command, tmp_path, level, capsys):
    assert exit_code(evaluate.main, command(reward_model="level", guidance_scale_2=3.0)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "guidance_scale_2 is 3.0, but the model has one transformer" in line
    assert not (tmp_path / "out").exists() and level.seen == 0


def folder_of_clips(folder, shift=0, listed=False):
    """Four rendered clips, some pixels lighter by `shift`, in the way of generate.py or of a validation."""
    folder.mkdir(parents=True)
    scenes = sample_scenes(4, torch.Generator().manual_seed(0))
    entries = []
    for i, (clip, prompt) in enumerate(
        zip(render(scenes, 9, 256, 256), captions(scenes), strict=True)
    ):
        write_mp4(folder / f"{i}.mp4", ((clip * 200).round() + shift).to(torch.uint8), 8)
        entries.append({"file": f"{i}.mp4", "prompt": prompt, "seed": 42})
        if not listed:
            (folder / f"{i}.json").write_text(json.dumps(entries[-1]))
    if listed:
        (folder / "clips.json").write_text(json.dumps(entries))
    return folder


def test_folders_of_clips(command, tmp_path, level, capsys):
    ours = folder_of_clips(tmp_path / "a" / "ours", 20)
    theirs = folder_of_clips(tmp_path / "a" / "theirs", listed=True)
    words = command("--clips", theirs, ours, reward_model="level")
    assert evaluate.main(words) == 0 and level.seen == 8
    found = result(tmp_path)
    assert list(found["systems"]) == ["theirs", "ours"]
    column = found["systems"]["ours"]["columns"]["level"]
    assert column["difference"] == pytest.approx(20, abs=1) and column["win_rate"] == 1
    assert column["verdict"] == "too few clips"
    assert evaluate.main(words) == 0 and level.seen == 8
    (tmp_path / "empty").mkdir()
    assert (
        exit_code(evaluate.main, command("--clips", tmp_path / "empty", reward_model="level")) == 2
    )
    words = command("--clips", ours, reward_model="level", output=tmp_path / "prompts.txt" / "out")
    assert exit_code(evaluate.main, words) == 2
    assert "prompts.txt" in capsys.readouterr().err
    for file in theirs.glob("*.mp4"):  # a validation that kept no videos
        file.unlink()
    assert (
        exit_code(
            evaluate.main,
            command("--clips", theirs, reward_model="level", output=tmp_path / "other"),
        )
        == 2
    )
    assert "theirs holds no mp4 file that its clips.json lists" in capsys.readouterr().err


class Rows:
    """Height of a clip in pixels."""

    names = ("rows",)

    def check(self, prompts):
        pass

    def score(self, clips, prompts, fps):
        return {"rows": torch.tensor([float(clip.shape[1]) for clip in clips])}


@pytest.mark.parametrize("layout", ["a validation's listing", slow("a record per clip")])
def test_files_of_tiny_clips_are_scored_in_the_size_that_was_sampled(
    command, tmp_path, monkeypatch, layout
):
    """Slow: the layout of generate.py."""
    monkeypatch.setitem(REWARDS, "rows", lambda setup: Rows())
    assert evaluate.main(command(reward_model="rows", output=tmp_path / "made")) == 0
    folder = tmp_path / "made" / "base"
    if layout == "a record per clip":
        (folder / "clips.json").unlink()
    assert evaluate.main(command("--clips", folder, reward_model="rows")) == 0
    scored = records(tmp_path, "made-base")
    assert [record["scores"]["rows"] for record in scored] == [16.0] * len(PROMPTS)


@pytest.mark.parametrize("damage", ["listing", "record", "video", "output"])
def test_damaged_clips_are_named(command, tmp_path, level, capsys, damage):
    folder = folder_of_clips(tmp_path / "clips", listed=damage == "listing")
    words = command("--clips", folder, reward_model="level")
    if damage == "output":
        assert evaluate.main(words) == 0
    broken = {
        "listing": folder / "clips.json",
        "record": folder / "1.json",
        "video": folder / "1.mp4",
    }
    broken["output"] = tmp_path / "out" / "settings.json"
    broken[damage].write_bytes(broken[damage].read_bytes()[:40])
    capsys.readouterr()
    assert exit_code(evaluate.main, words) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"evaluate: {broken[damage]} ") and "Traceback" not in said


@pytest.mark.parametrize("name", ["../secret.mp4", "/secret.mp4", "link.mp4", 7])
def test_a_list_of_clips_cannot_lead_out_of_its_folder(command, tmp_path, level, capsys, name):
    folder = folder_of_clips(tmp_path / "clips", listed=True)
    shutil.copy(folder / "0.mp4", tmp_path / "secret.mp4")
    (folder / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    name = str(tmp_path / "secret.mp4") if name == "/secret.mp4" else name
    (folder / "clips.json").write_text(
        json.dumps([{"file": name, "prompt": "a red circle", "seed": 1}])
    )
    assert exit_code(evaluate.main, command("--clips", folder, reward_model="level")) == 2
    said = capsys.readouterr().err
    assert level.seen == 0 and ("does not lie beside it" in said or "clip 1 has file 7; " in said)


@pytest.mark.parametrize("path", ["/weights", "/data/weights", "/a/b/c/weights", "../weights"])
def test_the_name_of_a_system_stays_in_the_output_folder(command, path, tmp_path):
    options, _ = evaluate.parse_arguments(command("--checkpoints", path))
    found = evaluate.system_names(options.checkpoints, options.clips)
    assert len(found) == 2 and all((tmp_path / name).parent == tmp_path for name in found)


@pytest.mark.parametrize("paths, names", [
    (["/home/jane/clips"], ["clips"]),
    (["/home/jane/ours/clips", "/home/jane/theirs/clips"], ["ours-clips", "theirs-clips"]),
    (["/home/jane/run/validation/step-000009"], ["run-step-000009"]),
    (["/x/run/checkpoints/step-1", "/y/run/checkpoints/step-1"], ["x-run-step-1", "y-run-step-1"]),
    (["/home/jane/base"], ["jane-base"]),  # that is the base model's
    (["/clips", "/clips"], ["clips"]),
    (["/base"], None),
    (["/"], None),
    (["/a/clips", "/a/../a/clips"], None),
])  # fmt: skip
def test_a_name_has_no_more_folders_than_it_needs(paths, names):
    clips = list(map(Path, paths))
    if names is None:
        with pytest.raises(ConfigError, match="rename a folder"):
            evaluate.system_names([], clips)
    else:
        assert list(evaluate.system_names([], clips)) == names
        assert list(evaluate.system_names(clips, [])) == ["base", *names]


def evaluated(ranks, words):
    """Exit code and the number of clips that this rank made."""
    options, config = evaluate.parse_arguments(words)
    plain = Hunyuan15.decode
    made = []
    Hunyuan15.decode = lambda self, latents: made.append(1) or plain(self, latents)
    return evaluate.Evaluation(options, config, ranks).run(), len(made)


def test_two_processes_share_the_prompts(command, tmp_path):
    assert run_ranks(2, evaluated, command(reward_model="shapes", output=tmp_path / "two")) == [
        (0, 2),
        (0, 2),
    ]
    assert evaluate.main(command(reward_model="shapes")) == 0
    assert json.loads((tmp_path / "two" / "evaluation.json").read_text()) == result(tmp_path)


def write(folder, values, prompt="<b>"):
    folder.mkdir(parents=True)
    entries = [
        {
            "file": f"{seed}.mp4",
            "prompt": prompt,
            "seed": seed,
            "scores": {"level": value},
            "gold": {"distance": -value},
        }
        for seed, value in enumerate(values)
    ]
    (folder / "clips.json").write_text(json.dumps(entries))
    (folder / "0.mp4").write_bytes(b"clip")


def test_three_systems_are_shown_side_by_side_with_their_verdicts(tmp_path):
    for name, value in (("one", 1.0), ("two", 2.0), ("three", 0.5)):
        write(tmp_path / name, [value + 0.01 * value * seed for seed in range(9)])
    shown = evaluate.write_pages(tmp_path, ["one", "two", "three"])
    assert "1.040 ± 0.021" in shown and "+1.040 ± 0.021, wins 100% of 9, better" in shown
    text = re.sub(' data-title="[^"]*"', "", (tmp_path / "evaluation.html").read_text())
    assert '<td class="better">+1.040 ±' in text and '<td class="worse">−0.520 ±' in text
    assert "<td>gold distance (lower is better)</td>" in text
    assert '<td class="better">−1.0400 ±' in text
    row = text.partition("<h3>&lt;b&gt;</h3>")[2].partition("</figure>")[0]
    assert row.count("<video") == 3
    assert row.index("<b>one<") < row.index("<b>two<") < row.index("<b>three<")
    assert text.count('class="scroll"') == text.count("<table>") == 2
    assert "Overall is VQ" not in text and text.count("Differences are taken clip by clip") == 1
    assert json.loads((tmp_path / "evaluation.json").read_text())["reference"] == "one"


def test_names_and_prompts_are_escaped(tmp_path):
    bad = "<script>alert(1)</script>"
    escaped = "&lt;script&gt;alert(1)&lt;/script&gt;"
    system = "<img src=x>"
    for name in ("one", system):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.mp4").write_bytes(b"clip")
        entry = {
            "file": "a.mp4",
            "prompt": bad,
            "seed": 1,
            "scores": {bad: 1.0},
            "gold": {bad: 0.5},
        }
        (tmp_path / name / "clips.json").write_text(json.dumps([entry]))
    evaluate.write_pages(tmp_path, [system, "one"])
    text = (tmp_path / "evaluation.html").read_text()
    assert "<script" not in text and "<img" not in text
    assert f"<h3>{escaped}</h3>" in text
    assert f"<small>{escaped}&nbsp;1.000" in text
    assert f"<td>{escaped}</td>" in text
    assert all(f"{tag}&lt;img src=x&gt;" in text for tag in ("<th>", "<th>one minus ", "<b>"))
