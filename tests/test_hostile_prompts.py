"""Prompts that look like paths, commands or markup: every file named after one stays in its folder."""

import json
import re

import pytest
import torch

import generate
from sage_grpo.data.requests import read_requests
from sage_grpo.rewards.registry import REWARDS
from sage_grpo.tools import evaluate

# imageio's reader leaves the pipes of its ffmpeg process to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

PROMPTS = [
    "../../outside",
    "/outside",
    "..",
    "a\nb\r\nc",
    "x" * 10_000,
    "\u202egpm.4pm",
    "🙂🏳️‍🌈",
    "~/a; touch b",
    "\x1b[2J",
]


class Level:
    names = ("level",)

    def check(self, prompts):
        pass

    def score(self, clips, prompts, fps):
        return {"level": torch.stack([clip.double().mean() for clip in clips])}


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "in" / "prompts.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join(json.dumps({"prompt": text, "seed": 5}) for text in PROMPTS))
    assert [prompt.text for prompt in read_requests(path)] == PROMPTS
    return path


def names(folder):
    """All files under a folder, relative to it."""
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def test_clips_of_generate(tiny_folder, tmp_path, prompts):
    fast = (
        "--num_inference_steps",
        "1",
        "--num_frames",
        "1",
        "--fixed_size",
        "16x16",
        "--guidance_scale",
        "1",
    )
    arguments = ("--model_path", str(tiny_folder), "--prompt_file", str(prompts), *fast)
    generate.main([*arguments, "--output_path", str(tmp_path / "out" / "clips")])
    made = names(tmp_path / "out" / "clips")
    clips = [name for name in made if re.fullmatch(r"\d{4}-[0-9a-f]{8}-5-0\.(mp4|json)", name)]
    assert len(clips) == 2 * len(PROMPTS) and set(made) - set(clips) == {"sheet.png"}
    assert names(tmp_path) == ["in/prompts.jsonl", *(f"out/clips/{name}" for name in made)]
    records = [
        json.loads((tmp_path / "out" / "clips" / name).read_text())
        for name in clips
        if name.endswith("json")
    ]
    assert [record["prompt"] for record in records] == PROMPTS


def test_clips_and_embeddings_of_an_evaluation(tiny_folder, tmp_path, prompts, monkeypatch):
    monkeypatch.setitem(REWARDS, "level", lambda setup: Level())
    flags = {
        "pretrained_model_root": tiny_folder, "validation_prompts": prompts, "validation_num_inference_steps": 1,
        "validate_video_length": 1, "validation_fixed_size": "16x16", "guidance_scale": 1, "reward_model": "level",
        "output": tmp_path / "out", "prompt_cache": tmp_path / "cache",
    }  # fmt: skip
    assert (
        evaluate.main([word for name, value in flags.items() for word in (f"--{name}", str(value))])
        == 0
    )
    ours = r"base/\d{4}-[0-9a-f]{8}-5\.(mp4|json)|base/clips\.json|settings\.json|evaluation\.(json|md|html)"
    made = names(tmp_path / "out")
    assert all(re.fullmatch(ours, name) for name in made) and len(made) == 2 * len(PROMPTS) + 5
    cached = names(tmp_path / "cache")
    assert all(re.fullmatch(r"[0-9a-f]{16}/[0-9a-f]{32}\.safetensors", name) for name in cached)
    assert len(cached) == len(PROMPTS) + 1  # the empty one is the negative of guidance
    page = (tmp_path / "out" / "evaluation.html").read_text()
    assert "../../outside" in page and "<script" not in page


def test_half_a_character_is_refused_on_the_command_line(tiny_folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        generate.main(
            [
                "--model_path",
                str(tiny_folder),
                "--prompt",
                "a \udcff",
                "--output_path",
                str(tmp_path / "out"),
            ]
        )
    assert stop.value.code == 2 and "holds half a character" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
