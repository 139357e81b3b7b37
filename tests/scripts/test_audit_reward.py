"""The audit on the embedded world and on files: it passes the rewards that we ship and rejects those that mislead."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from sage_grpo.rewards.registry import REWARDS
from sage_grpo.runs.media import write_mp4
from sage_grpo.tools.audit import EDITS, WRONG_PROMPT
from sage_grpo.worlds.shapes.reward import ShapesReward
from sage_grpo.worlds.shapes.scenes import captions, render, sample_scenes
from scripts import audit_reward
from tests.programs import exit_code, flag_list

TINY = Path(__file__).parents[2] / "assets" / "tiny"
# imageio's reader leaves the pipes of its ffmpeg process to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


class Blind(ShapesReward):
    """Reads the same prompt whatever is asked."""

    def score(self, clips, prompts, fps):
        return super().score(clips, ["a red circle moving left"] * len(clips), fps)


class Clean(ShapesReward):
    """Judges the picture alone, and says so."""

    names = ("clean",)

    def score(self, clips, prompts, fps):
        scores = super().score(clips, prompts, fps)
        return {"clean": scores["VQ"] + scores["MQ"]}


class Style:
    """A reward of one score, computed from clip and prompt."""

    names = ("style",)

    def __init__(self, value):
        self.value = value

    def check(self, prompts):
        pass

    def score(self, clips, prompts, fps):
        return {"style": torch.stack([self.value(clip.double() / 255) for clip in clips])}


def constant(clip):
    return torch.tensor(0.7)


def stillness(clip):
    return -(clip[1:] - clip[:-1]).abs().mean()


@pytest.fixture
def audit(tmp_path, capsys, monkeypatch):
    """audit(reward, flag=value, ...) -> exit code, what it printed, and its record."""

    def run(reward="shapes", *words, num_clips=10, **flags):
        if not isinstance(reward, str):
            built = reward
            monkeypatch.setitem(REWARDS, "ocr", lambda setup: built)
            weights = json.dumps(dict.fromkeys(built.names, 1.0))
            flags = {"reward_weights": weights} | flags
            reward = "ocr"
        flags = {
            "pretrained_model_root": TINY,
            "reward_model": reward,
            "num_clips": num_clips,
            "output": tmp_path / "audit",
        } | flags
        code = exit_code(audit_reward.main, [*map(str, words), *flag_list(flags)])
        file = tmp_path / "audit" / "audit.json"
        record = json.loads(file.read_text()) if file.is_file() else None
        return code, capsys.readouterr(), record

    return run


def test_the_learned_reward_passes_and_its_weaknesses_are_named(audit, tmp_path):
    """They are those of its card: it does not tell slow from fast, and hardly sees blur."""
    code, printed, record = audit("videoalign", num_clips=16, reward_batch_size=16)
    assert code == 0
    assert record["fit"]
    assert not record["wrong"]
    for kind in ("slowed", "blurred"):
        assert any(
            f"notice {kind} clips" in text.replace("notices", "notice") for text in record["weak"]
        )
    marks = {(v["edit"], v["score"]): v["mark"] for v in record["verdicts"]}
    assert (
        marks["noisy", "VQ"]
        == marks["shaky", "MQ"]
        == marks[WRONG_PROMPT, "TA"]
        == marks["reversed", "TA"]
        == "falls"
    )
    assert marks[WRONG_PROMPT, "VQ"] == "same", "VQ never sees the prompt"
    assert "16 clips" in printed.out
    assert "weak: hardly notices blurred clips" in printed.out
    with Image.open(tmp_path / "audit" / "sheet.png") as sheet:
        assert sheet.height > 90 * (1 + len(EDITS))
        assert sheet.getbbox()


def test_the_hand_written_reward_passes(audit):
    code, printed, record = audit("shapes")
    assert code == 0
    assert "Fit for training." in printed.out
    assert record["clips"] == 10
    assert {v["edit"] for v in record["verdicts"]} == {*EDITS, WRONG_PROMPT}
    changes = {(v["edit"], v["score"]): v["change"] for v in record["verdicts"]}
    assert changes["noisy", "VQ"]["mean"] < -1
    assert 0 < changes["noisy", "VQ"]["half"] < 0.5
    assert not any("slowed" in text for text in record["weak"]), (
        "it sees speed, as the rendered slow clips show"
    )
    assert ("reversed", "TA") in {
        (v["edit"], v["score"]) for v in record["verdicts"] if v["must_fall"]
    }


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        (Blind(), "TA does not fall for wrong prompt clips"),
        (Style(constant), "constant: every clip gets the same total"),
        (Style(stillness), "prefers frozen clips: their total rises"),
    ],
    ids=["blind", "constant", "still"],
)
def test_a_reward_that_misleads_is_rejected_by_name(audit, reward, sentence):
    code, printed, record = audit(reward)
    assert code == 1
    assert not record["fit"]
    assert any(text.startswith(sentence) for text in record["wrong"])
    assert f"WRONG: {sentence}" in printed.out
    assert "Not fit for training." in printed.out


def test_a_reward_that_ignores_the_prompt_passes_with_a_warning(audit):
    code, printed, record = audit(Clean())
    assert (code, record["wrong"]) == (0, [])
    assert [text.partition(":")[0] for text in record["warnings"]] == ["prompt-blind"]
    assert "warning: prompt-blind" in printed.out


def test_weights_count(audit):
    code, _, record = audit("shapes", reward_weights='{"MQ": -1.0, "TA": 0.01}')
    assert code == 1
    assert any(text.startswith("prefers frozen clips") for text in record["wrong"])


def folder_of_clips(folder, count, fps=8):
    folder.mkdir()
    scenes = sample_scenes(count, torch.Generator().manual_seed(0))
    for i, (clip, prompt) in enumerate(
        zip(render(scenes, 9, 128, 128), captions(scenes), strict=True)
    ):
        write_mp4(folder / f"{i}.mp4", (clip * 255).round().to(torch.uint8), fps)
        (folder / f"{i}.json").write_text(json.dumps({"prompt": prompt, "seed": 42}))
    return folder


@pytest.mark.slow
def test_clips_of_files(audit, tmp_path, tiny_folder):
    """The model need not even be there: only its reward is.

    Slow: encodes clips as files; clips in memory are audited in `make test`.
    """
    good = folder_of_clips(tmp_path / "good", 9)
    elsewhere = {"pretrained_model_root": tmp_path / "nowhere"}
    code, printed, record = audit("shapes", "--clips", good, **elsewhere)
    assert code == 0
    assert record["clips"] == 9
    assert "9 clips" in printed.out
    must = {(v["edit"], v["score"]) for v in record["verdicts"] if v["must_fall"]}
    assert must == {
        ("noisy", "VQ"),
        ("shaky", "MQ"),
        ("frozen", "MQ"),
        (WRONG_PROMPT, "TA"),
    }
    code, printed, _ = audit("shapes", "--clips", good, num_clips=5, **elsewhere)
    assert code == 2
    assert "5 clips are too few to tell; give at least 8" in printed.err
    mixed = folder_of_clips(tmp_path / "mixed", 2, fps=16)
    code, printed, _ = audit("shapes", "--clips", good, mixed, **elsewhere)
    assert code == 2
    assert "several frame rates" in printed.err


def test_what_cannot_be_audited(audit, tiny_folder, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\n")
    code, printed, record = audit(
        "shapes", pretrained_model_root=tiny_folder, train_prompts=prompts
    )
    assert code == 2
    assert record is None
    assert "name a folder with --clips" in printed.err
    code, printed, _ = audit("shapes", nonsense=1)
    assert code == 2
    assert "audit_reward: unknown flag --nonsense" in printed.err
