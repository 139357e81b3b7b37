"""Learning a reward from answers: the real VideoAlign classes at a tiny size, and raters with a known taste."""

import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from sage_grpo.rewards.videoalign.folder import check_folder
from sage_grpo.rewards.videoalign.reward import VideoAlign
from sage_grpo.rewards.videoalign.writing import write_with_head
from sage_grpo.runs.media import write_mp4
from sage_grpo.tools.prefer import learn, study_clips
from sage_grpo.tools.prefer.__main__ import main, parse_arguments
from sage_grpo.tools.prefer.answers import AnswersFile, read_answers
from sage_grpo.tools.prefer.heads import (
    Comparisons,
    choose_strength,
    fit_heads,
    full_head,
    prompt_folds,
    raw_scores,
)
from sage_grpo.tools.prefer.learn import calibration, clips_key, judged, prepare_draft
from sage_grpo.tools.prefer.pairs import Trial
from sage_grpo.tools.prefer.study import Study, StudyClip, StudyError, clips_folder
from sage_grpo.tools.prefer.study_clips import StudyClips
from sage_grpo.worlds.shapes.world import ShapesWorld

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
    assert after.loss.value < before.loss.low
    assert after.loss.low < after.loss.value < after.loss.high


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


# the command

BASE = Path(__file__).parents[3] / "assets" / "tiny" / "VideoReward"
SIDE = 48


def drawn(number):
    """A clip (F, H, W, 3) of the shapes world."""
    return ShapesWorld().draw(["a red circle moving left"], 9, SIDE, SIDE, seed=number)[0]


@cache
def encoded(number):
    """The bytes of its mp4 file, which take the longest to make."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "clip.mp4"
        write_mp4(file, drawn(number), 8)
        return file.read_bytes()


@pytest.fixture(scope="module")
def clips():
    """48 clips, and the VQ that the embedded reward gives them."""
    videos = [drawn(number) for number in range(48)]
    reward = VideoAlign(BASE)
    return videos, reward.score(videos, ["a red circle moving left"] * 48, 8)["VQ"].tolist()


def write_study(path, clips, likes_what_the_base_likes, prompts=24):
    """Two clips per prompt; the rater agrees with the base, or always says the opposite."""
    _, scores = clips
    clips_folder(path).mkdir(parents=True)
    listed = []
    for number in range(2 * prompts):
        name = f"{number}.mp4"
        (clips_folder(path) / name).write_bytes(encoded(number))
        prompt = f"a red circle moving left at speed {number // 2}"
        listed.append(StudyClip(name, 0, prompt, height=SIDE, width=SIDE))
    pairs = tuple((2 * i, 2 * i + 1) for i in range(prompts))
    file = AnswersFile(path, Study(("base",), ("vq",), tuple(listed), pairs, repeat=0.0))
    for pair, (first, second) in enumerate(pairs):
        prefers_first = (scores[first] > scores[second]) == likes_what_the_base_likes
        swapped = pair % 2 == 1
        choice = {"vq": "left" if prefers_first != swapped else "right"}
        file.add("ann", pair, Trial(pair, swapped), choice, 1.0)
    file.close()
    return path


@pytest.mark.slow
def test_a_reward_learns_what_a_rater_likes_and_the_folder_says_how_well(clips, tmp_path, capsys):
    """The whole command on the embedded reward; the fit and the writing alone have fast tests."""
    answers = write_study(tmp_path / "prefs.jsonl", clips, likes_what_the_base_likes=False)
    output = tmp_path / "reward"
    assert main(["learn", str(answers), "--base", str(BASE), "--output", str(output)]) == 0
    check_folder(output)
    record = json.loads((output / "learning.json").read_text())
    assert record["before"]["accuracy"]["mean"] < 0.3
    assert record["after"]["accuracy"]["mean"] > 0.7
    assert record["after"]["loss"]["value"] < record["before"]["loss"]["value"]
    assert record["prompts"] == {"training": 19, "held_out": 5}
    assert (record["answers"], record["raters"]) == (24, 1)
    assert "24 answers of 1 rater" in (output / "README.md").read_text()
    assert not (tmp_path / "reward.partial").exists()

    new = VideoAlign(output)
    videos, _ = clips
    before = VideoAlign(BASE).score(videos[:4], ["a red circle"] * 4, 8)
    after = new.score(videos[:4], ["a red circle"] * 4, 8)
    assert not torch.equal(after["VQ"], before["VQ"])
    for name in ("MQ", "TA"):  # nobody was asked about them
        torch.testing.assert_close(after[name], before[name], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_an_adapter_is_learned_merged_and_written(clips, tmp_path):
    """The whole command with --method lora on the embedded reward; its parts have fast tests in test_lora.py."""
    answers = write_study(tmp_path / "prefs.jsonl", clips, likes_what_the_base_likes=False)
    output = tmp_path / "reward"
    words = ["learn", str(answers), "--base", str(BASE), "--output", str(output)]
    assert main([*words, "--method", "lora", "--epochs", "2", "--rank", "4"]) == 0
    check_folder(output)
    record = json.loads((output / "learning.json").read_text())
    assert record["method"] == "lora" and record["lora"]["rank"] == 4
    assert record["lora"]["losses"].keys() >= {"0", "1"}
    assert record["after"]["accuracy"]["mean"] > 0.7 > record["before"]["accuracy"]["mean"]
    stored = {path.suffix for path in output.rglob("*") if path.is_file()}
    assert stored == {".json", ".safetensors", ".txt", ".md"}
    videos, _ = clips
    scores = VideoAlign(output).score(videos[:4], ["a red circle"] * 4, 8)
    assert all(values.isfinite().all() for values in scores.values())
    assert not (tmp_path / "reward.partial").exists()


@pytest.mark.slow
def test_a_reward_that_is_not_better_is_not_written_unless_told_to(clips, tmp_path, capsys):
    """The whole command, for a rater who agrees with the base; the fit alone has a fast test."""
    answers = write_study(tmp_path / "prefs.jsonl", clips, likes_what_the_base_likes=True)
    words = ["learn", str(answers), "--base", str(BASE), "--output", str(tmp_path / "reward")]
    assert main(words) == 1
    assert not (tmp_path / "reward").exists()
    assert "not written" in capsys.readouterr().out
    assert main([*words, "--even_if_worse"]) == 0
    assert (tmp_path / "reward" / "learning.json").is_file()
    with pytest.raises(SystemExit):
        main(words)
    assert "exists already" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_call_continues_and_another_base_starts_anew(clips, tmp_path, monkeypatch):
    """Decodes and scores files several times; what a stored state is made of has no fast test."""
    answers = write_study(tmp_path / "prefs.jsonl", clips, True, prompts=12)
    study, _ = read_answers(answers)
    reward = VideoAlign(BASE)

    def hidden_states(folder, key):
        return StudyClips(reward, study, answers, tmp_path / folder, key).hidden(keeps=False)

    expected = hidden_states("whole", "key")
    seen = []
    real = study_clips.read_mp4

    def interrupted(path):
        seen.append(path)
        if len(seen) == 20:
            raise KeyboardInterrupt
        return real(path)

    monkeypatch.setattr(study_clips, "read_mp4", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hidden_states("draft", "key")
    hidden = hidden_states("draft", "key")
    assert torch.equal(hidden, expected)
    assert len(seen) == 20 + 24 - study_clips.BATCH
    hidden_states("draft", "other")
    assert len(seen) == 20 + 24 - study_clips.BATCH + 24


def test_a_folder_of_others_is_neither_continued_nor_deleted(tmp_path):
    draft = tmp_path / "reward.partial"
    prepare_draft(draft)
    (draft / "key-000000.safetensors").write_text("states")
    prepare_draft(draft)  # a second call continues it
    assert (draft / "key-000000.safetensors").is_file()

    foreign = tmp_path / "foreign.partial"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    link = tmp_path / "link.partial"
    link.symlink_to(draft)
    for place in (foreign, link):
        with pytest.raises(StudyError, match="was not made by `learn`"):
            prepare_draft(place)
    assert (foreign / "thesis.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {draft.name, foreign.name, link.name}


def test_stored_states_belong_to_the_device_the_precision_and_the_clips(clips, tmp_path):
    answers = write_study(tmp_path / "prefs.jsonl", clips, True, prompts=2)
    study, _ = read_answers(answers)
    words = ["learn", str(answers), "--base", str(BASE), "--output", str(tmp_path / "reward")]
    _, options = parse_arguments(words)

    def key(device="cpu", dtype=torch.float32):
        return clips_key(options, study, device, dtype)

    keys = [key(), key(device="cuda"), key(dtype=torch.bfloat16)]
    assert key() == keys[0]
    (clips_folder(answers) / "1.mp4").write_bytes(encoded(7))
    keys.append(key())
    assert len(set(keys)) == 4


@pytest.mark.parametrize("method", ["heads", "lora"])
def test_the_plan_of_the_published_model_is_near_what_was_measured(
    clips, tmp_path, monkeypatch, method
):
    """48 clips of 121 x 480 x 848, 5040 patches each: the peak of heads was 8.3 GB on an H200."""
    answers = write_study(tmp_path / "prefs.jsonl", clips, True, prompts=10)
    study, _ = read_answers(answers)
    words = ["learn", str(answers), "--base", str(BASE), "--output", str(tmp_path / "reward")]
    _, options = parse_arguments([*words, "--method", method])
    study_clips = StudyClips(VideoAlign(BASE), study, answers, tmp_path, "key")
    of_full_size = torch.zeros(5040, 1176), (5, 24, 42)
    monkeypatch.setattr(study_clips, "patches", lambda number, keeps: of_full_size)
    monkeypatch.setattr(learn, "LARGE", 0)
    line = learn.plan_line(study_clips, options, num_comparisons=48)
    gigabytes = float(re.search(r": (\S+) GB, at most about \d+ minutes", line)[1])
    assert gigabytes == pytest.approx(8.3, rel=0.05)


@pytest.mark.parametrize("flag", ["--rank=4", "--epochs=8", "--learning_rate=1e-3", "--batch=2"])
def test_flags_of_the_adapter_are_refused_without_one(tmp_path, capsys, flag):
    words = ["learn", "none.jsonl", "--base", str(BASE), "--output", str(tmp_path / "reward"), flag]
    with pytest.raises(SystemExit) as stop:
        main(words)
    name = flag.partition("=")[0]
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and f"{name} is" in line and "--method lora" in line

    _, options = parse_arguments([*words, "--method", "lora"])
    defaults = {"rank": 16, "epochs": 8, "learning_rate": 2e-4, "batch": 16}
    differing = {name for name, value in defaults.items() if getattr(options, name) != value}
    assert differing <= {name.removeprefix("--")}


def test_too_little_to_learn_from_is_refused(clips, tmp_path, capsys):
    answers = write_study(tmp_path / "prefs.jsonl", clips, True, prompts=4)
    with pytest.raises(SystemExit) as stop:
        main(["learn", str(answers), "--base", str(BASE), "--output", str(tmp_path / "reward")])
    assert stop.value.code == 2
    assert "learning needs at least 10" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["VideoReward", "VideoReward_split"])
def test_a_head_is_replaced_in_either_layout(videoalign_folders, tmp_path, layout):
    base = videoalign_folders[layout]
    old = VideoAlign(base)
    head = full_head(old.head)
    head[0] += 1
    write_with_head(base, tmp_path / "new", head)
    check_folder(tmp_path / "new")
    assert not list((tmp_path / "new").rglob("*.pth"))
    new = VideoAlign(tmp_path / "new")
    assert torch.equal(new.head, head)
    for name, value in old.model.state_dict().items():
        assert torch.equal(new.model.state_dict()[name], value), name
