"""Learning a reward from answers: the real VideoAlign classes at a tiny size, and raters with a known taste."""

import json
import random

import pytest
import torch

from sage_grpo.rewards.videoalign.folder import check_folder
from sage_grpo.rewards.videoalign.reward import VideoAlign
from sage_grpo.runs.media import read_mp4, write_mp4
from sage_grpo.tools.prefer import learn as learn_module
from sage_grpo.tools.prefer.__main__ import main
from sage_grpo.tools.prefer.answers import AnswersFile
from sage_grpo.tools.prefer.heads import (
    Comparisons,
    choose_strength,
    fit_heads,
    prompt_folds,
    raw_scores,
)
from sage_grpo.tools.prefer.learn import cached_hidden, calibration, judged, reduced
from sage_grpo.tools.prefer.pairs import Trial
from sage_grpo.tools.prefer.study import Clip, Study, clips_folder

# imageio's reader leaves the pipes of its ffmpeg process to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


# the fit, on hidden states alone


@pytest.fixture(scope="module")
def hidden():
    return torch.randn(400, 3, 12, generator=torch.Generator().manual_seed(0))


def compared(hidden, taste, shares, noise, count=400):
    """Answers about random pairs by a rater with a linear taste (3, D), some of them by accident."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(len(hidden), (count,), generator=generator)
    second = torch.randint(len(hidden), (count,), generator=generator)
    liking = raw_scores(hidden, taste).sum(1)
    difference = liking[first] - liking[second]
    labels = difference.sign() * (difference.abs() > 0.5)
    accident = torch.rand(count, generator=generator) < noise
    labels = torch.where(
        accident, torch.randint(-1, 2, (count,), generator=generator).float(), labels
    )
    prompts = tuple(f"prompt {number % 50}" for number in range(count))
    rows = torch.tensor(shares, dtype=torch.float64).expand(count, 3)
    return Comparisons(first, second, rows, labels.double(), prompts, ("q",) * count)


def test_the_fit_finds_the_taste_and_leaves_other_heads_alone(hidden):
    taste = torch.zeros(3, 12)
    taste[1, 4] = 2.0
    head = 0.3 * torch.randn(3, 12, generator=torch.Generator().manual_seed(2))
    comparisons = compared(hidden, taste, [0.0, 1.0, 0.0], noise=0.1)
    losses = choose_strength(hidden, head, comparisons, seed=0)
    fitted = fit_heads(hidden, head, comparisons, min(losses, key=losses.__getitem__))
    assert torch.equal(fitted[[0, 2]], head[[0, 2]].double())
    cosine = torch.nn.functional.cosine_similarity(fitted[1], taste[1].double(), dim=0)
    assert cosine > 0.9
    before = judged(comparisons, raw_scores(hidden.double(), head.double()))
    after = judged(comparisons, raw_scores(hidden.double(), fitted))
    assert before.accuracy.mean < 0.7 < 0.85 < after.accuracy.mean
    assert after.loss < before.loss


def test_a_strong_penalty_keeps_the_base(hidden):
    comparisons = compared(hidden, torch.ones(3, 12), [1.0, 1.0, 1.0], noise=0.0)
    head = torch.ones(3, 12)
    assert torch.allclose(fit_heads(hidden, head, comparisons, 1e6), head.double(), atol=1e-4)


def test_folds_keep_prompts_together():
    prompts = [f"prompt {number % 7}" for number in range(70)]
    folds = prompt_folds(prompts, 3, seed=1)
    assert set(folds) == {0, 1, 2}
    assert len(set(zip(prompts, folds, strict=True))) == 7
    assert folds != prompt_folds(prompts, 3, seed=2)


def test_calibration_of_a_reward_that_knows_and_of_one_that_boasts():
    generator = torch.Generator().manual_seed(0)
    differences = 3 * torch.randn(20000, generator=generator, dtype=torch.float64)
    first = torch.sigmoid(differences - 1.6094)
    second = torch.sigmoid(-differences - 1.6094)
    u = torch.rand(20000, generator=generator, dtype=torch.float64)
    labels = torch.where(u < first, 1.0, torch.where(u < first + second, -1.0, 0.0))
    decided = labels != 0
    bins, error = calibration(differences[decided], labels[decided])
    assert error < 0.02
    assert [part["predicted"] for part in bins] == sorted(part["predicted"] for part in bins)
    assert calibration(5 * differences[decided], labels[decided])[1] > 0.05


def test_magnified_clips_are_seen_in_their_own_size(tmp_path):
    clip = torch.randint(
        0, 256, (4, 12, 16, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    write_mp4(tmp_path / "a.mp4", clip, 8)
    video, _ = read_mp4(tmp_path / "a.mp4")
    assert video.shape[1] > 200
    small = reduced(video, 12, 16)
    assert small.shape == clip.shape
    assert (small.int() - clip.int()).abs().float().mean() < 4
    assert reduced(video, 0, 0) is video
    assert reduced(video, 11, 16) is video


# the command


@pytest.fixture
def base(videoalign_folders):
    return videoalign_folders["VideoReward"]


def bright_study(path, prompts=24, noise=0.0, contrary=False):
    """Pairs of a dark and a bright clip; the rater likes bright ones."""
    folder = clips_folder(path)
    folder.mkdir(parents=True)
    generator = random.Random(0)
    clips = []
    for prompt in range(prompts):
        for level in (40, 200):
            name = f"{len(clips)}.mp4"
            frames = torch.full(
                (4, 32, 32, 3), level + generator.randint(-30, 30), dtype=torch.uint8
            )
            write_mp4(folder / name, frames, 4)
            clips.append(Clip(name, 0, f"prompt {prompt}", height=32, width=32))
    pairs = tuple((2 * i, 2 * i + 1) for i in range(prompts))
    file = AnswersFile(path, Study(("base",), ("vq",), tuple(clips), pairs, repeat=0.0))
    for pair in range(prompts):
        swapped = generator.random() < 0.5
        prefers_bright = contrary and pair % 2 == 0
        side = "left" if swapped != prefers_bright else "right"
        file.add("ann", pair, Trial(pair, swapped), {"vq": side}, 1.0)
    file.close()
    return path


def test_a_reward_learns_to_like_what_the_rater_likes(base, tmp_path, capsys):
    answers = bright_study(tmp_path / "prefs.jsonl")
    output = tmp_path / "reward"
    words = ["learn", str(answers), "--base", str(base), "--output", str(output)]
    assert main(words) == 0
    check_folder(output)
    record = json.loads((output / "learning.json").read_text())
    assert record["after"]["accuracy"]["mean"] > record["before"]["accuracy"]["mean"]
    assert record["prompts"] == {"training": 19, "held_out": 5}
    assert (record["answers"], record["raters"]) == (24, 1)
    assert "24 answers of 1 rater" in (output / "README.md").read_text()
    assert not list(output.rglob("*.pth"))
    assert not (tmp_path / "reward.partial").exists()

    old, new = VideoAlign(base), VideoAlign(output)
    dark, bright = (torch.full((4, 32, 32, 3), level, dtype=torch.uint8) for level in (40, 200))
    scores = new.score([dark, bright], ["prompt 1", "prompt 1"], 4)
    assert scores["VQ"][1] > scores["VQ"][0]
    before = old.score([dark], ["prompt 1"], 4)
    after = new.score([dark], ["prompt 1"], 4)
    for name in ("MQ", "TA"):  # nobody was asked about them
        torch.testing.assert_close(after[name], before[name], atol=2e-3, rtol=2e-3)


def test_a_reward_that_is_not_better_is_not_written(base, tmp_path, capsys):
    answers = bright_study(tmp_path / "prefs.jsonl", contrary=True)
    words = ["learn", str(answers), "--base", str(base), "--output", str(tmp_path / "reward")]
    code = main(words)
    if code == 0:
        pytest.skip(
            "half of the answers contradict the other half, and still it was better by chance"
        )
    assert code == 1
    assert not (tmp_path / "reward").exists()
    assert "not written" in capsys.readouterr().out
    assert main([*words, "--even_if_worse"]) == 0
    assert (tmp_path / "reward" / "learning.json").is_file()


def test_a_killed_call_continues(base, tmp_path, monkeypatch):
    answers = bright_study(tmp_path / "prefs.jsonl")
    study, _ = learn_module.read_answers(answers)
    reward = VideoAlign(base)
    expected = cached_hidden(reward, study, answers, tmp_path / "whole", "key")

    seen = []
    real = learn_module.read_mp4

    def interrupted(path):
        seen.append(path)
        if len(seen) == 20:
            raise KeyboardInterrupt
        return real(path)

    monkeypatch.setattr(learn_module, "read_mp4", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cached_hidden(reward, study, answers, tmp_path / "draft", "key")
    hidden = cached_hidden(reward, study, answers, tmp_path / "draft", "key")
    assert torch.equal(hidden, expected)
    assert len(seen) == 20 + len(study.clips) - learn_module.BATCH
    cached_hidden(reward, study, answers, tmp_path / "draft", "other")  # of another base
    assert len(seen) == 20 + 2 * len(study.clips) - learn_module.BATCH


@pytest.mark.parametrize("change, message", [
    ({"prompts": 4}, "learning takes at least 10"),
])  # fmt: skip
def test_too_little_to_learn_from_is_refused(base, tmp_path, capsys, change, message):
    answers = bright_study(tmp_path / "prefs.jsonl", **change)
    with pytest.raises(SystemExit) as stop:
        main(["learn", str(answers), "--base", str(base), "--output", str(tmp_path / "reward")])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
