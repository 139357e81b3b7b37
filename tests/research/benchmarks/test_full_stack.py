"""The full-size benchmark in small: its first run on the CPU, stopped by a signal, and the page of all parts."""

import json

import pytest

from research.benchmarks import full_stack as script
from research.benchmarks import parts, random_model

ABOUT = {
    "device": "a card",
    "driver": "1.2",
    "cores": 2,
    "date": "2026-01-01",
    "command": "python -m this",
}
ABOUT |= {"torch": "2", "nccl": "2.28", "python": "3", "packages": {"diffusers": "0.42"}}
LOAD = [("load reward", 2.0, 5.0), ("load encoders", 3.0, 14.5), ("encode prompts", 20.0, 15.5)]
ITERATION = [
    ("rollout", 70.5, 38.0),
    ("decode", 9.0, 30.0),
    ("reward", 0.4, 31.0),
    ("anchor", 4.25, 39.0),
]
ITERATION += [("update", 14.0, 41.0), ("save", 1.5, 33.0)]


def records(rows):
    return [dict(zip(("phase", "seconds", "peak_gb"), row, strict=True)) for row in rows]


def outcome(**more):
    line = {"policy/ratio_max_deviation": 0.0, "reward/total": 0.125}
    run = {
        "records": records(LOAD + ITERATION),
        "before": 9.0,
        "ready": 50.0,
        "prompts": 415,
        "whole": 200.0,
    }
    run |= {"host_gb": 7.5}
    return (
        run
        | {
            "checkpoints": {"step-000001": 0.91},
            "iterations": [line, line],
            "exit_code": 0,
            "seconds": 1,
        }
        | more
    )


@pytest.fixture
def results():
    sampling = {"frames": 81, "height": 352, "width": 624, "num_steps": 10, "guidance": 6.0}
    generated = {
        "records": records([("sample", 9.0, 20.0)]),
        "whole": 40.0,
        "clip_bytes": 12345,
        "host_gb": 1.75,
    }
    return {
        "about": ABOUT,
        "flags": ["--config", "x.yaml"],
        "planned": {"rollout": 37.5, "update": 40.4},
        "parts": {
            "model": {"line": "model: 41.0 GB in 30 s", "gb": 41.0, "seconds": 1},
            "train": outcome(exit_code=75, stop_seconds=6.0),
            "resume": outcome(),
            "generate": generated
            | {"sampling": sampling, "checkpoint": "step-000002", "seconds": 1},
        },
    }


def test_the_page_has_time_and_peak_of_every_phase(results):
    text = script.page(results)
    prose = " ".join(text.split())
    assert (
        "| rollout | 70.5 | 38.0 | 70.5 | 38.0 | 37.5 |" in text
        and "| encode prompts | 20.0 | 15.5 |" in text
    )
    for name, *_ in LOAD + ITERATION:
        assert f"\n| {name} | " in text
    assert (
        "exit code 75 after 6.0 s, with step-000001 of 0.91 GB" in prose and "415 prompts" in prose
    )
    assert prose.count("7.5 GB of host memory") == 2 and "1.8 GB of host memory" in prose
    assert "the two iterations: 0, 0. Reward: 0.125, 0.125" in prose
    assert (
        "81 x 352 x 624, 10 steps, guidance 6, from step-000002" in prose
        and "| sample | 9.0 | 20.0 |" in text
    )
    assert (
        text.startswith("# All parts at full size, a card, 2026-01-01\n")
        and "    python -m this\n" in text
    )


@pytest.mark.parametrize("name", script.NAMES)
def test_the_page_shows_what_failed_and_all_the_rest(results, name):
    results["parts"][name] = {"error": "PartError: exit code 9", "seconds": 3.0}
    text = script.page(results)
    assert f"{name}: failed after 3 s." in text and "PartError: exit code 9" in text
    assert ("12,345 bytes" in text) == (name != "generate") and ("41.0 GB in 30 s" in text) == (
        name != "model"
    )
    assert ("exit code 75" in text) == (name != "train")


@pytest.mark.slow
def test_a_run_is_measured_and_stopped_in_its_second_rollout(tmp_path, monkeypatch):
    """Slow: a real run; the page is tested from records."""
    monkeypatch.setattr(script, "about", lambda *_: ABOUT)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    random_model.main(
        ["--tiny", "--reward", "--device", "cpu", "--output", str(tmp_path / "model")]
    )
    words = [
        "--rehearse",
        "--only",
        "train",
        "--scratch",
        str(tmp_path),
        "--output",
        str(tmp_path / "page.md"),
    ]
    with pytest.raises(SystemExit) as ended:
        script.main(words)
    assert ended.value.code == 0, (tmp_path / "page.md").read_text()
    found = json.loads((tmp_path / "page.json").read_text())["parts"]["train"]
    names = [record["phase"] for record in found["records"]]
    assert (
        names[:3] == ["load reward", "load encoders", "encode prompts"]
        and names.count("rollout") == 2
    )
    assert {"load transformer", "decode", "reward", "update", "save"} < set(names)
    assert found["exit_code"] == 75 and list(found["checkpoints"]) == ["step-000001"]
    assert 0.1 < found["host_gb"] < 10
    assert 0 < found["before"] < found["ready"] and found["prompts"] == 2
    assert parts.metrics(tmp_path / "run")[-1]["step"] == 1
    assert "| update | " in (tmp_path / "page.md").read_text()
