"""Several ranks on one device: two of them through the launcher, one killed, and the page of all parts."""

import json
import sys

import pytest
import torch

from research.benchmarks import nccl as script
from research.benchmarks import nccl_page
from sage_grpo.files.tensor_files import TensorFile, write_file
from sage_grpo.models.shards import rank_file, shards
from tests.research.benchmarks.test_full_stack import ABOUT

LINE = {"kind": "train", "policy/ratio_max_deviation": 0.0, "reward/total": 1.0, "policy/loss": 2.0}
LINE |= {"policy/grad_norm": 4.0, "kl/anchor": 0.0}


def write_run(run, weights, split, **changes):
    """A run of one iteration whose last checkpoint has a tensor in two pieces."""
    folder = run / "checkpoints" / "step-000001"
    (folder / "trainer").mkdir(parents=True)
    for rank, rows in enumerate((slice(0, split), slice(split, None))):
        contents = shards({"weights/a": weights[rows]}, {"weights/a": rank * split})
        write_file(folder / rank_file(rank), contents)
    (run / "metrics.jsonl").write_text(json.dumps(LINE | {"step": 1} | changes) + "\n")


@pytest.fixture
def runs(tmp_path):
    start, weights = torch.zeros(4, 2), torch.ones(4, 2)
    (tmp_path / "model" / "transformer").mkdir(parents=True)
    write_file(tmp_path / "model" / "transformer" / "a.safetensors", TensorFile({"a": start}, {}))
    other = weights.clone()
    other[3, 1] += 0.5
    write_run(tmp_path / "reference", weights, 2)
    write_run(tmp_path / "run", other, 1, **{"policy/grad_norm": 5.0})
    return tmp_path


def test_weights_are_compared_however_they_are_sharded(runs):
    found = script.compared(runs / "reference", runs / "run", runs / "model")
    assert found["largest"] == 0.5 and found["equal"] == 7 / 8
    assert found["of_change"] == pytest.approx(0.5 / 8**0.5)
    assert found["metrics"] == {
        "reward/total": 0,
        "policy/loss": 0,
        "policy/grad_norm": 0.2,
        "kl/anchor": 0,
    }
    same = script.compared(runs / "run", runs / "run", runs / "model")
    assert (same["largest"], same["equal"], same["of_change"]) == (0, 1, 0)


def record(event, phase, time, rank=0, attempt=0):
    return {"event": event, "phase": phase, "time": time, "rank": rank, "attempt": attempt}


def test_recovery_is_measured_from_the_kill():
    before = [
        record("begin", "rollout", 1.0),
        record("kill", "", 10.0, rank=4),
        record("end", "update", 10.5),
    ]
    after = [
        record("start", "", 15.0, 1, 1),
        record("begin", "rollout", 30.0, 0, 1),
        record("end", "update", 42.0, 0, 1),
    ]
    found = script.recovery([*before, *after])
    assert found == {
        "recovery": {"start": 5.0, "rollout": 20.0, "iteration": 32.0},
        "iterations_after": 1,
    }
    with pytest.raises(script.PartError, match="no rank was killed"):
        script.recovery(after)


def test_the_planner_is_asked_without_the_reward(tmp_path):
    flags = [*script.FULL.split(), "--batch_size", "1", "--micro_batch_size", "1"]
    flags += ["--pretrained_model_root", str(tmp_path / "none")]
    found = script.planned(flags, 4)
    assert 21 < found["memory"]["rollout"] < 30 and found["traffic"]["weights"] > 30
    assert set(found["memory"]) == set(script.MOMENTS)
    assert found["memory"]["rollout"] == pytest.approx(found["memory"]["anchor"], rel=0.05)


@pytest.fixture
def results():
    iteration = script.shown_metrics(
        LINE | {"step": 1, "time/rollout": 12.5, "time/update": 20.25, "other": 1}
    )
    run = {
        "ranks": 2,
        "command": "torchrun x",
        "whole": 60.0,
        "iterations": [iteration],
        "saves": [1.25],
        "seconds": 1,
    }
    run |= {
        "peaks": [
            {"rollout": 20.0, "update": 22.0, "host": 2.5},
            {"rollout": 19.0, "update": 24.0, "host": 3.0},
        ]
    }
    run |= {
        "planned": {"memory": dict.fromkeys(script.MOMENTS, 21.0), "traffic": {"weights": 30.5}}
    }
    far = dict.fromkeys(script.COMPARED, 1e-6)
    layout = {"largest": 2e-5, "equal": 0.5, "of_change": 1e-4, "metrics": far, "ratio": 0.0}
    end = {
        "recovery": {"start": 5.0, "rollout": 20.0, "iteration": 32.0},
        "iterations_after": 1,
        "killed": 4,
    }
    return {
        "about": ABOUT,
        "parts": {
            "agree": {
                "layouts": {"dp 2": layout, "sp 2": {"error": "no", "seconds": 2}},
                "seconds": 1,
            },
            "models": {"lines": ["a: 19 GB in 20 s"], "seconds": 1},
            "link": {
                "speeds": {"2": {"all-gather": 2.5, "all-to-all": 1.5}},
                "bytes": 3e8,
                "seconds": 1,
            },
            "full2": run,
            "full4": run,
            "recipe": run | {"checkpoint_gb": 6.6},
            "kill": run | layout | end,
        },
    }


def test_the_page_has_every_part(results):
    text = nccl_page.page(results)
    prose = " ".join(text.split())
    assert "| dp 2 | 2.0e-05 | 1.0e-04 | 1.0e-06 | 1.0e-06 | 1.0e-06 | 50.0% | 0 |" in text
    assert "| sp 2 | failed |" in text and "| groups of 2 | 2.50 | 1.50 |" in text
    assert text.count("| 1 | 12.5 | 0.0 | 0.0 | 0.0 | 20.2 | 0 | 1 |") == 3
    assert "| update | 21.0 | 22.0 | 24.0 | -12% |" in text and "weights 30.5" in prose
    assert text.count("| host |  | 2.5 | 3.0 |  |") == 3
    assert "6.6 GB; saves kept the run waiting for 1.2 s" in prose
    assert (
        "| the next iteration is done | 32.0 |" in text
        and "by at most 2.0e-05, in norm by 1.0e-04" in prose
    )
    assert "- a: 19 GB in 20 s" in text and text.startswith(
        "# NCCL with several ranks on one GPU, a card"
    )


def test_the_page_says_whether_the_runs_differed_before_the_kill(results):
    sentence = "the first gradient norm differs by 5.0e-01 already"
    assert sentence not in " ".join(nccl_page.page(results).split())
    line = results["parts"]["kill"]["iterations"][0]
    results["parts"]["kill"] |= {"iterations": [line | {"policy/grad_norm": 6.0}]}
    assert sentence not in " ".join(
        nccl_page.page(results).split()
    )  # the restarted ranks did all of it
    results["parts"]["kill"] |= {"iterations_after": 0}
    assert sentence in " ".join(nccl_page.page(results).split())


def test_the_page_says_when_the_recovery_is_exact(results):
    results["parts"]["kill"] |= {"largest": 0.0}
    assert "bit-equal to those of the unbroken run" in " ".join(nccl_page.page(results).split())


def test_layouts_are_compared_without_tf32(tmp_path, monkeypatch, results):
    tell = "import os; print('TF32', os.environ.get('NVIDIA_TF32_OVERRIDE', 'as by default'))"
    monkeypatch.setattr(script, "python", lambda *_: [sys.executable, "-c", tell])
    found = script.Ranks(tmp_path, script.GPU).agree(60)
    told = [log.read_text().splitlines()[-1] for log in (tmp_path / "logs").iterdir()]
    assert told == ["TF32 0"] * len(script.LAYOUTS)

    sentence = "in fp32, without TF32, three iterations"
    assert sentence not in " ".join(nccl_page.page(results).split())  # a page of older results
    results["parts"]["agree"] = found | {"seconds": 1}
    assert sentence in " ".join(nccl_page.page(results).split())


@pytest.mark.parametrize("name", script.NAMES)
def test_the_page_shows_what_failed_and_what_there_was(results, name):
    kept = {"recipe", "kill", "full2", "full4"} & {name}
    results["parts"][name] = (results["parts"][name] if kept else {}) | {
        "error": "PartError: late",
        "seconds": 3.0,
    }
    text = nccl_page.page(results)
    assert f"{name}: failed after 3 s." in text and "PartError: late" in text
    assert text.count("| update | 21.0 | 22.0 | 24.0 | -12% |") == 3 + (name == "kill")
    del results["parts"][name]
    assert (f"{name}: not run." in nccl_page.page(results)) == (name != "models")


@pytest.mark.slow
def test_two_ranks_are_started_compared_and_measured(tmp_path, monkeypatch):
    """Slow: real processes; the page is tested from records."""
    monkeypatch.setattr(script, "about", lambda *_: ABOUT)
    words = [
        "--rehearse",
        "--only",
        "agree",
        "link",
        "--scratch",
        str(tmp_path),
        "--output",
        str(tmp_path / "page.md"),
    ]
    with pytest.raises(SystemExit) as ended:
        script.main(words)
    text = (tmp_path / "page.md").read_text()
    assert ended.value.code == 0, text
    found = json.loads((tmp_path / "page.json").read_text())["parts"]
    assert list(found) == ["agree", "models", "link"] and list(found["link"]["speeds"]) == ["2"]
    layouts = found["agree"]["layouts"]
    assert len(layouts) == 4 and all(layout["of_change"] < 1e-3 for layout in layouts.values()), (
        text
    )
    assert min(found["link"]["speeds"]["2"].values()) > 0 and "| groups of 2 | " in text
    assert not (tmp_path / "full").exists() and "full2: not run." in text


@pytest.mark.parametrize("sizes", [script.GPU, script.CPU])
def test_the_flags_of_all_runs_fit_together_and_need_no_ffmpeg(sizes):
    def check(flags, ranks):
        words = flags.split()
        assert script.parse(words).validation_videos == 0
        assert script.planned(words, ranks)["memory"]["rollout"] > 0

    for layout in script.LAYOUTS.values():
        if layout.ranks <= sizes.most_ranks:
            batch = f"--batch_size {sizes.clips // layout.dp}"
            check(f"{script.AGREE} {layout.flags} {sizes.agree_flags} {batch}", layout.ranks)
    for ranks in (2, 4):
        share = f"--batch_size {4 // ranks} --micro_batch_size {4 // ranks}"
        check(f"{script.FULL} {share} {sizes.full_flags}", ranks)
    recipe = f"--config configs/hunyuan15_8gpu.yaml {script.RECIPE} {sizes.recipe_flags}"
    check(recipe, sizes.recipe_ranks)


def test_only_the_models_that_are_needed_are_written(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(script, "Program", lambda command, log: commands.append(command[-1]))
    ranks = script.Ranks(tmp_path, script.GPU)
    for wanted in (script.NAMES, ["kill"], ["full2"], ["agree", "link"]):
        ranks.write_models(wanted)
    names = [
        [word.split("/")[-1] for word in text.split() if word.startswith(str(tmp_path))]
        for text in commands
    ]
    assert names == [["reward", "recipe", "full"], ["reward", "recipe"], ["reward", "full"], []]
