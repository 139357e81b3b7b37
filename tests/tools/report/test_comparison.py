"""The page that compares several runs."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from sage_grpo.config.fields import Config
from sage_grpo.files.foreign import Refused
from sage_grpo.tools.report.__main__ import main
from sage_grpo.tools.report.page import write_report
from tests.programs import exit_code
from tests.tools.fake_run import make_run, read_lines, write_lines


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Read-only: `copy` before changing it."""
    return make_run(tmp_path_factory.mktemp("runs") / "sage", iterations=2, every=2, prompts=9)


@pytest.fixture
def copy(whole, tmp_path):
    """A second run, `dance`, with the same clips and other scores."""
    run = Path(shutil.copytree(whole, tmp_path / "dance"))
    for path in run.glob("validation/*/clips.json"):
        clips = json.loads(path.read_text())
        for number, clip in enumerate(clips):
            clip["scores"]["total"] += 0.5 + 0.1 * (number % 2)
            clip["gold"]["distance"] += 0.05
        path.write_text(json.dumps(clips))
    return change(run, sde_type="dance_grpo", output_dir="elsewhere")


def change(run: Path, **flags) -> Path:
    config = yaml.safe_load((run / "config.yaml").read_text()) | flags
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return run


def rows(text: str) -> dict[str, list[str]]:
    """The cells of all tables by the first of their row."""
    found = [
        re.findall(r"<td.*?>(.*?)</td>", row)
        for row in re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)
    ]
    return {cells[0]: cells[1:] for cells in found if cells}


def test_two_runs_on_one_page(whole, copy, tmp_path):
    text = write_report(whole, copy, output=tmp_path / "page.html").read_text()
    assert "http" not in text and "<script" not in text and "<h1>sage · dance</h1>" in text
    assert re.findall(r"<h2>(.*?)</h2>", text) == [
        "Last validations",
        "Settings that differ",
        "Validation",
        "Clips",
        "Training",
    ]
    assert text.count("2 iterations, last validated after 2") == 2
    found = rows(text)
    gains = [0.5 + 0.1 * (i % 2) for i in range(9)]
    half = 2.306 * np.std(gains, ddof=1) / 3  # Student's t, 8 degrees of freedom
    assert found["total reward"][2] == f"+0.544 ± {half:.3f}, wins 100% of 9, better"
    assert found["gold distance (lower is better)"][2] == "+0.0500 ± 0.0000, wins 0% of 9, worse"
    assert found["VQ"][2] == "+0.000 ± 0.000, wins 50% of 9, not significant"
    assert found["sde_type"] == ["sage_grpo", "dance_grpo"]
    assert "output_dir" not in found
    assert "eta" not in found
    first = re.search(r'<div class="row">(.*?)<figcaption>', text, re.DOTALL).group(1)
    assert first.count("<video") == 2 and first.index("<b>sage</b>") < first.index("<b>dance</b>")
    assert text.count("<video") == 18
    panels = dict(re.findall(r"<h3>([^<]*)</h3><svg(.*?)</svg>", text, re.DOTALL))
    assert {"Total reward", "Match", "KL", "Gradient norm", "gold/prompt_distance"} <= panels.keys()


def test_a_setting_that_an_older_run_does_not_know_has_todays_default(whole, copy, tmp_path):
    new = Path(shutil.copytree(whole, tmp_path / "new"))
    (new / "config.yaml").write_text(Config(eta=0.123).to_yaml())
    (copy / "config.yaml").write_text("seed: 7\nan_old_flag: 1\n")
    text = write_report(new, copy, output=tmp_path / "page.html").read_text()
    settings = rows(text.split("<h2>Settings that differ</h2>")[1].split("<h2>")[0])
    assert settings.pop("seed") == [str(Config().seed), "7"]
    assert settings.pop("an_old_flag") == [
        "–",
        "1",
    ]
    assert settings == {"eta": ["0.123", str(Config().eta)]}


def test_totals_under_other_weights_are_not_compared(whole, copy, tmp_path):
    change(copy, reward_weights={"VQ": 0.0, "MQ": 1.0, "TA": 1.0})
    text = write_report(whole, copy, output=tmp_path / "page.html").read_text()
    assert "total reward" not in rows(text) and "Overall" in rows(text)
    assert "The total rewards are left out" in text


@pytest.mark.parametrize(
    "name, reward_model, compared",
    [
        ("reward own code", ["files/own.py:own"], False),
        ("reward videoalign weights", None, False),
        ("reward videoalign code", None, True),  # a comment may have changed
        ("validation_num_inference_steps", None, True),
    ],
)
def test_scores_of_different_rewards_are_not_compared(
    whole, copy, tmp_path, name, reward_model, compared
):
    runs = [Path(shutil.copytree(whole, tmp_path / "first")), copy]
    for number, run in enumerate(runs):
        change(run, reward_model=reward_model)
        start, *lines = read_lines(run)
        write_lines(run, [start | {"yardstick": {"validation": {name: number, "x": 1}}}, *lines])
    text = write_report(*runs, output=tmp_path / "page.html").read_text()
    assert f"The validations differ in {name}." in text
    assert {"VQ", "Overall", "total reward"} & rows(text).keys() == (
        {"VQ", "Overall", "total reward"} if compared else set()
    )
    assert "gold match" in rows(text)


def test_the_default_place_and_three_runs_of_the_same_name(whole, tmp_path, monkeypatch, capsys):
    runs = [Path(shutil.copytree(whole, tmp_path / name / "sage")) for name in "ab"]
    for run in runs:  # nothing has to be drawn
        write_lines(run, [line for line in read_lines(run) if line["kind"] == "validation"])
    monkeypatch.chdir(tmp_path)
    assert main([str(whole), *map(str, runs)]) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    text = (tmp_path / "comparison.html").read_text()
    assert f"<h1>{whole} · {runs[0]} · {runs[1]}</h1>" in text and "None but the folder." in text
    assert len(rows(text)["total reward"]) == 2, "differences have a table of their own"


def refusal(capsys, *runs: Path) -> str:
    """What is said, in one sentence, instead of a page."""
    assert exit_code(main, [*map(str, runs), "--output", str(runs[0].parent / "no.html")]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and not (runs[0].parent / "no.html").exists()
    return err


def test_what_cannot_be_compared_is_refused_in_one_sentence(whole, copy, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert (
        refusal(capsys, copy, tmp_path / "empty")
        == f"{tmp_path / 'empty'} is not a run folder: it holds no metrics.jsonl\n"
    )
    assert (
        refusal(capsys, copy, tmp_path / "empty/../dance")
        == f"{copy} is named twice; name each run once\n"
    )
    for path in copy.glob("validation/*/clips.json"):
        path.write_text(json.dumps([clip | {"seed": 1} for clip in json.loads(path.read_text())]))
    said = f"the last validations of {copy} and {whole} have no prompt and seed in common; compare runs with the same "
    assert refusal(capsys, copy, whole).startswith(said)
    shutil.rmtree(copy / "validation")
    assert (
        refusal(capsys, copy, whole)
        == f"{copy} has no validation with clips, so it cannot be compared\n"
    )


def test_no_text_of_a_run_becomes_markup_and_no_link_is_followed(whole, copy, tmp_path):
    bad = "<script>alert(1)</script>"
    good = "&lt;script&gt;alert(1)&lt;/script&gt;"
    (copy / "config.yaml").write_text(yaml.safe_dump({"sde_type": bad, bad: 1, "kl_weight": bad}))
    run = copy.rename(tmp_path / "<img src=x>")
    write_lines(run, [line | {bad: 1.0, f"{bad}_stderr": 0.1} for line in read_lines(run)])
    text = write_report(whole, run, output=tmp_path / "page.html").read_text()
    assert "<script" not in text and "<img" not in text
    assert f">{good}</td>" in text
    assert f"<h3>{good}</h3>" in text
    assert "<b>&lt;img src=x&gt;</b>" in text
    listing = run / "validation/step-000002/clips.json"
    listing.symlink_to(listing.rename(tmp_path / "elsewhere"))
    with pytest.raises(Refused, match=f"{listing} is a link"):
        write_report(whole, run, output=tmp_path / "page.html")
