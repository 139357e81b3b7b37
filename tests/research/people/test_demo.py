"""The end of the demo: from the files that its stages leave to the results and the page that tells the story."""

import json
import subprocess
from types import SimpleNamespace

import pytest
import yaml

import post_train
from research.people import demo
from research.people.taste import TIE
from sage_grpo.config.yaml_files import read_yaml
from sage_grpo.runs.media import write_mp4
from sage_grpo.tools.prefer import __main__ as prefer
from sage_grpo.tools.prefer.answers import AnswersFile
from sage_grpo.tools.prefer.pairs import Trial
from sage_grpo.tools.prefer.study import Study, StudyClip
from sage_grpo.train import limits
from tests.research.people.test_people import DISLIKED, LIKED

# imageio's reader leaves the pipes of its ffmpeg process to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
PROMPTS = [f"prompt {number} <b>" for number in range(8)]


def write_validation(folder, clip, matches):
    folder.mkdir(parents=True)
    records = []
    for number, (prompt, match) in enumerate(zip(PROMPTS, matches, strict=True)):
        write_mp4(folder / f"{number}.mp4", clip[0], 8)
        records.append(
            {"file": f"{number}.mp4", "prompt": prompt, "seed": 1, "gold": {"match": match}}
        )
    (folder / "clips.json").write_text(json.dumps(records))


def write_study(path, choice):
    """A study of the clips before (first) and after (second)."""
    clips = [StudyClip(f"{i}.mp4", i % 2, PROMPTS[i // 2]) for i in range(16)]
    pairs = tuple((2 * i, 2 * i + 1) for i in range(8))
    file = AnswersFile(path, Study(("before", "after"), ("vq",), tuple(clips), pairs, repeat=0.0))
    for pair in range(8):
        file.add("judge", pair, Trial(pair, swapped=False), {"vq": choice}, 1.0)
    file.close()


@pytest.fixture
def loop(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "HELD_PROMPTS", 8)
    loop = demo.Loop(tmp_path / "seed-0", seed=0)
    write_validation(loop.run_folder / "validation" / "step-000000", DISLIKED, [0, 1] * 4)
    write_validation(
        loop.run_folder / "validation" / f"step-{demo.ITERATIONS:06d}", LIKED, [1, 1] * 4
    )
    write_study(loop.folder / "taught.jsonl", "tie")
    write_study(loop.folder / "preferences.jsonl", "right")
    loop.reward.mkdir()
    accuracy = {"mean": 0.5, "low": 0.4, "high": 0.6, "count": 50, "clusters": 20}
    judged = {"accuracy": accuracy}
    learning = {"answers": 300, "before": judged, "after": judged}
    (loop.reward / "learning.json").write_text(json.dumps(learning))
    (loop.folder / "seconds.json").write_text('{"learn": 7.0}')
    measured = {name: accuracy | {"mean": 0.9} for name in ("before", "after")}
    (loop.folder / "taste_accuracy.json").write_text(json.dumps(measured))
    return loop


def test_results_and_page_tell_what_the_stages_left(loop):
    record = loop.results()
    assert record["taste_gain"]["mean"] > 3 * TIE
    assert record["taste_gain"]["half"] < 1
    assert record["match"] == {"before": 0.5, "after": 1.0}
    assert record["match_gain"]["mean"] == 0.5
    assert record["blind_win_rate"]["mean"] == 1.0
    assert record["taste_accuracy"]["after"]["mean"] == 0.9
    table = demo.record_page({"date": "today", "torch": "2", "seeds": [record] * 5})
    assert table.count("| 0 | 90.0 % (40 to 60) | 90.0 % (40 to 60) | 50.0 % ") == 5
    assert "| mean | 90.0 ± 0.0 % |" in table
    loop.write_page(json.loads(json.dumps(record)))
    page = (loop.folder / "people.html").read_text()
    assert page.count("data:video/mp4;base64,") == 16
    assert "50 % → 100 %" in page and "8 for the trained model, 0 for the one before" in page
    assert "<b>&lt;" not in page.replace("<b>before", "").replace("<b>after", "")
    assert "prompt 0 &lt;b&gt;" in page


SMALLEST = {
    "STUDY_PROMPTS": 10,
    "CLIPS_PER_PROMPT": 2,
    "PAIRS": 10,
    "TRAIN_PROMPTS": 8,
    "HELD_PROMPTS": 4,
    "ITERATIONS": 1,
}
SMALL_BATCH = {"batch_size": 4, "num_generations": 4, "train_clips": 2}


def run_here(command, cwd, check):
    """post_train.py in this process, which has imported everything."""
    assert command[1] == "post_train.py" and cwd == demo.ROOT and check
    assert post_train.main(command[2:]) == 0


@pytest.mark.slow
def test_the_whole_loop_from_the_first_label_to_the_page(tmp_path, monkeypatch):
    """Slow: every program of the loop, on as few clips as it takes. Ten answers need not make a better reward."""
    for name, value in SMALLEST.items():
        monkeypatch.setattr(demo, name, value)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(read_yaml(str(demo.ROOT / demo.RECIPE)) | SMALL_BATCH))
    monkeypatch.setattr(demo, "RECIPE", str(recipe))
    monkeypatch.setattr(demo, "tool", lambda *words: prefer.main([*words, "--even_if_worse"]))
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": run_here}))
    monkeypatch.setattr(limits, "NUM_DRAWN", 2)
    demo.main(["--output", str(tmp_path), "--record", str(tmp_path / "record.json")])
    (record,) = json.loads((tmp_path / "record.json").read_text())["seeds"]
    assert record["answers"] == 10
    assert set(record["seconds"]) == {"teach", "learn", "train", "compare"}
    assert sum(record["verdicts"].values()) == record["blind_win_rate"]["count"] == 4
    assert record["taste_gain"]["count"] == record["match_gain"]["count"] == 4
    assert (tmp_path / "record.md").read_text().count("| 0 |") == 1
    page = (tmp_path / "seed-0" / "people.html").read_text()
    assert page.count("data:video/mp4;base64,") >= 8


def test_stages_that_are_done_are_not_repeated(loop, monkeypatch):
    def forbidden(*words, **kwargs):
        raise AssertionError(words)

    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=forbidden, Popen=forbidden))
    monkeypatch.setattr(demo, "PAIRS", 8)
    monkeypatch.setattr(demo, "round", lambda value: 0, raising=False)
    loop.teach()
    loop.learn()
    loop.train()
    loop.compare()


def test_prompts_of_the_stages_do_not_overlap(tmp_path):
    loop = demo.Loop(tmp_path, seed=3)
    parts = [loop.study_prompts, loop.held_prompts, loop.train_prompts]
    assert [len(part) for part in parts] == [
        demo.STUDY_PROMPTS,
        demo.HELD_PROMPTS,
        demo.TRAIN_PROMPTS,
    ]
    assert len(set().union(*parts)) == sum(map(len, parts))
