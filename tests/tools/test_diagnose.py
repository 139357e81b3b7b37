"""What the command prints, and whether an iteration takes longer than planned."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from research.studies.diagnosis_check import read_records, restore
from sage_grpo.config.fields import Config
from sage_grpo.runs.case import Case
from sage_grpo.runs.history import read_run
from sage_grpo.tools.diagnose import main, slower_than_planned
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.tools.plan.times import times
from sage_grpo.tools.report.page import page
from tests.programs import exit_code
from tests.tools.fake_run import make_run, read_lines, write_lines

ROOT = Path(__file__).parents[2]
RECORDED = read_records(ROOT / "tests" / "fixtures" / "diagnosis.json.gz")["small"]


def change_settings(folder, **changes):
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | changes))


def test_the_list_of_a_faulty_run(tmp_path, capsys):
    assert main([str(restore(RECORDED["equalizer off"], tmp_path / "run"))]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.strip() == "The reward rises."
    assert second.startswith("1. one step dominates: denoising step 11 gets ")
    assert second.endswith(
        "Remedy: --use_grad_balancing True. Panel of report.html: Gradient at the velocity."
    )


def test_neither_the_list_nor_the_report_advises_what_is_set(undrawn, tmp_path, capsys):
    folder = restore(RECORDED["equalizer off"], tmp_path / "run")
    advice = "--use_grad_balancing True"
    assert advice in page(read_run(folder))
    change_settings(folder, use_grad_balancing=True)
    main([str(folder)])
    for text in (capsys.readouterr().out, page(read_run(folder))):
        assert "one step dominates" in text and advice not in text


@pytest.mark.parametrize("place", ["error", "score", "status"])
def test_no_escape_of_a_run_reaches_the_terminal(tmp_path, capsys, place):
    """What a reward raises, the name of a score and the message of a stopped run are quoted."""
    escape = "\x1b]0;PWNED\x07"
    folder = restore(RECORDED["healthy-1"], tmp_path / "run")
    metrics = {
        "error": {"reward/failed": 9, "reward/error": escape},
        "score": {
            "signal/rescoring": 0.0,
            "signal/call_difference": 9.0,
            "signal/call_sorted": 9.0,
            "signal/call_score": escape,
        },
        "status": {},
    }[place]
    write_lines(folder, [line | metrics for line in read_lines(folder)])
    if place == "status":
        message = f"the first ratio differs from 1 {escape}"
        (folder / "status.json").write_text(json.dumps({"state": "failed", "message": message}))
    assert main([str(folder)]) == 1
    out = capsys.readouterr().out
    assert "PWNED" in out and out.replace("\n", "").isprintable()


def test_clips_behind_a_link_are_not_read(tmp_path, capsys):
    folder = make_run(tmp_path / "run", iterations=2, every=2, prompts=3)
    (folder / "validation").rename(tmp_path / "elsewhere")
    (folder / "validation").symlink_to(tmp_path / "elsewhere")
    assert exit_code(main, [str(folder)]) == 2
    assert "validation is a link, which is not followed" in capsys.readouterr().err


def test_a_healthy_run(tmp_path, capsys):
    assert main([str(restore(RECORDED["healthy-1"], tmp_path / "run"))]) == 0
    assert (
        capsys.readouterr().out == "The reward rises. Nothing is wrong as far as it was recorded.\n"
    )


@pytest.mark.parametrize(
    ("logged", "changes", "needed"),
    [
        (1, {}, 8),
        (1, {"log_interval": 3}, 22),
        (5, {}, 8),
        (7, {"validation_interval": 30}, 8),
        (10, {}, 17),  # the trend is known, but not how late iterations compare with early ones
        (1, {"max_steps": 6}, None),
        (1, {"log_interval": 10}, None),
    ],
)
def test_a_run_that_has_just_begun_is_not_called_healthy(tmp_path, capsys, logged, changes, needed):
    folder = restore(RECORDED["healthy-1"], tmp_path / "run")
    change_settings(folder, **changes)
    lines = [line for line in read_lines(folder) if line["kind"] != "validation"]
    write_lines(folder, [line | {"time/total": 180.0} for line in lines[: 1 + logged]])

    assert main([str(folder)]) == 3
    out = capsys.readouterr().out
    assert "Nothing is wrong" not in out and out.count("\n") == 1
    if needed is None:
        assert "--max_steps" in out
    else:
        assert f"after iteration {needed}, {3 * (needed - logged)} min" in out


def test_a_second_validation_makes_a_judgment_possible(tmp_path, capsys):
    folder = restore(RECORDED["healthy-1"], tmp_path / "run")
    change_settings(folder, validation_interval=2)
    steps = (0, 1)
    write_lines(folder, [line for line in read_lines(folder) if line["step"] in steps])
    assert main([str(folder)]) == 3
    assert "after iteration 2," in capsys.readouterr().out


def test_a_flat_run_without_a_finding_is_told_whom_to_ask(tmp_path, capsys):
    folder = restore(RECORDED["learning rate / 10,000"], tmp_path / "run")
    lines = [
        {key: value for key, value in line.items() if not key.startswith(("kl/", "updates"))}
        for line in read_lines(folder)
    ]
    write_lines(folder, lines)
    assert main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("The reward is flat.") and "Nothing is wrong" not in out
    assert "scripts/audit_reward.py" in out and "tools.doctor" in out


def test_the_first_box_of_the_report(undrawn, tmp_path):
    folder = restore(RECORDED["eta 0.005"], tmp_path / "run")
    text = page(read_run(folder))
    first = text.index('<ol class="findings">')
    assert first < text.index('class="tiles"') and text.count("<li>") == 2
    assert (
        "<b>too little exploration</b>: all steps together add noise of 0.011 to initial noise of 1. Clips"
        in text
    )
    lines = [line | {"reward/error": "<gone>", "reward/failed": 9} for line in read_lines(folder)]
    write_lines(folder, lines)
    assert "first with: &lt;gone&gt;." in page(read_run(folder))
    assert 'class="findings"' not in page(
        read_run(restore(RECORDED["healthy-1"], tmp_path / "healthy"))
    )


def test_what_is_no_run(tmp_path, capsys):
    assert exit_code(main, [str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path} is not a run folder: it holds no metrics.jsonl\n"
    folder = restore(RECORDED["healthy-1"], tmp_path / "run")
    (folder / "config.yaml").write_text("batch_size: none\n")
    assert exit_code(main, [str(folder)]) == 2
    assert "batch_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("factor", "device", "fewer", "expected"),
    [
        (4.0, "NVIDIA H200", 0, True),
        (1.2, "NVIDIA H200", 0, False),
        (4.0, "CPU", 0, False),
        (4.0, "NVIDIA H200", 1, False),
    ],
    ids=["late", "in time", "a machine without a plan", "another model"],
)
def test_an_iteration_is_compared_with_its_plan(tmp_path, factor, device, fewer, expected):
    config = Config(
        pretrained_model_root=str(tmp_path / "absent"), use_lora=True, batch_size=4, dtype="bf16"
    )
    config = replace(config, enable_fsdp=True, num_frames=81, height=352, width=624, fps=24)
    plan = plan_of(config, 1)
    folder = restore(RECORDED["healthy-1"], tmp_path / "run")
    (folder / "config.yaml").write_text(config.to_yaml())
    lines = read_lines(folder)
    seconds = factor * sum(times(plan).values())
    head = lines[0] | {
        "device": device,
        "ranks": 1,
        "trainable_parameters": plan.trained.total - fewer,
    }
    write_lines(folder, [head, *(line | {"time/total": seconds} for line in lines[1:])])
    evidence = slower_than_planned(Case(read_run(folder)))
    assert bool(evidence) == expected
    if expected:
        assert f"{seconds:.3g} s" in evidence and f"{seconds / factor:.3g} s" in evidence


def test_a_configuration_that_cannot_be_planned_is_diagnosed_all_the_same(tmp_path, capsys):
    folder = restore(RECORDED["healthy-1"], tmp_path / "run")
    write_lines(folder, [line | {"device": "NVIDIA H200"} for line in read_lines(folder)])
    (folder / "config.yaml").write_text("batch_size: 2\nnum_generations: 4\n")
    assert exit_code(main, [str(folder)]) in (0, 1)
    assert "The reward rises." in capsys.readouterr().out
