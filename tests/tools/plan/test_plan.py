"""The planner: measured settings it was not calibrated on, the command line, and the table of docs/scaling.md."""

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sage_grpo.config.parse import parse
from sage_grpo.models.cost import BACKWARD_OF_ATTENTION, Architecture
from sage_grpo.tools.plan import __main__ as program
from sage_grpo.tools.plan.calibration import calibrate
from sage_grpo.tools.plan.memory import fits, memory, peak
from sage_grpo.tools.plan.model import Plan, Trained
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.tools.plan.remedies import remedies
from sage_grpo.tools.plan.times import (
    backward_time,
    clips_per_gpu_hour,
    forward_time,
    times,
    validation_time,
)
from tests.programs import exit_code

ROOT = Path(__file__).parents[3]
GIB = 2**30
# research/benchmarks/results/2026-11-15-planner-figures.md: LoRA of one clip of 81 x 480 x 848, forward and backward
LORA = "--use_lora True --enable_fsdp True --batch_size 2 --num_generations 2 --micro_batch_size 1 --guidance_scale 1"
CLIP = "--num_frames 81 --height 480 --width 848"


def made(flags: str, gpus: int = 1) -> Plan:
    return plan_of(parse(["--pretrained_model_root", "no/such/folder", *flags.split()]), gpus)


def training_time(plan: Plan) -> float:
    return forward_time(plan) + backward_time(plan)


@pytest.mark.parametrize(
    ("compiled", "kept", "forward", "both"),
    [(True, True, 1.240, 4.281), (False, True, 1.554, 5.477)],
)
def test_measurements_of_the_calibration_come_back(compiled, kept, forward, both):
    plan = made(f"{LORA} {CLIP} --compile {compiled} --keep_attention {kept}")
    assert plan.tokens == 33_540
    assert forward_time(plan) == pytest.approx(forward, rel=0.03)
    assert training_time(plan) == pytest.approx(both, rel=0.03)


@pytest.mark.parametrize(("compiled", "seconds"), [(True, 5.140), (False, 6.345)])
def test_held_out_training_with_recomputed_attention(compiled, seconds):
    assert training_time(made(f"{LORA} {CLIP} --compile {compiled}")) == pytest.approx(
        seconds, rel=0.15
    )


@pytest.mark.parametrize(("kept", "seconds"), [(False, 5.393), (True, 4.554)])
def test_held_out_training_of_all_weights(kept, seconds):
    flags = f"{LORA} --use_lora False {CLIP} --compile True --keep_attention {kept}"
    assert training_time(made(flags)) == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(("compiled", "seconds"), [(False, 2.910), (True, 2.268)])
def test_held_out_forward_of_121_frames(compiled, seconds):
    plan = made(f"{LORA} --num_frames 121 --height 480 --width 848 --compile {compiled}")
    assert plan.tokens == 49_440
    assert forward_time(plan) == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(
    ("tokens", "forward", "both"), [(49_440, 34.7e-3, 127e-3), (18_168, 4.4e-3, 17.3e-3)]
)
def test_held_out_attention(tokens, forward, both):
    one_block = Architecture(
        layers=1, heads=16, width=16 * 128, mlp_ratio=4, parameters=0, block=0, vae=0
    )
    work = one_block.forward(tokens, 0).attention
    rates = calibrate()
    predicted = work / rates.attention
    assert predicted == pytest.approx(forward, rel=0.15)
    backward = work * BACKWARD_OF_ATTENTION / rates.attention_backward
    assert predicted + backward == pytest.approx(both, rel=0.15)


@pytest.mark.parametrize(("compiled", "measured"), [(True, 33.5 * GIB), (False, 34.0 * GIB)])
def test_held_out_memory_of_kept_attention(compiled, measured):
    parts = memory(made(f"{LORA} {CLIP} --keep_attention True --compile {compiled}"))
    predicted = parts["weights"]["update"] + parts["activations"]["update"]
    assert predicted == pytest.approx(measured, rel=0.05)


def test_held_out_peak_of_a_grpo_run():
    flags = "--use_lora True --enable_fsdp True --gather_for_rollout True --keep_attention True --micro_batch_size 1 "
    plan = made(
        flags + "--batch_size 2 --num_generations 2 --num_sampling_steps 2 --reward_model shapes"
    )
    assert plan.branches == 2 and plan.tokens == 18_168
    assert peak(plan)[1] == pytest.approx(38.7e9, rel=0.15)


def test_held_out_grpo_iteration():
    flags = "--use_lora True --enable_fsdp True --gather_for_rollout True --keep_attention True --compile True "
    flags += "--micro_batch_size 1 --batch_size 4 --num_generations 4 --timestep_fraction 0.25 --reward_model shapes"
    plan = made(flags)
    found = times(plan)
    assert found["rollout"] == pytest.approx(74.3, rel=0.15)
    assert found["update"] == pytest.approx(67.7, rel=0.15)
    assert peak(plan)[1] == pytest.approx(39.5e9, rel=0.15)


def run(capsys, command: str) -> tuple[int, str, str]:
    code = exit_code(program.main, shlex.split(command))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command_says_that_a_recipe_fits(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, text, _ = run(
        capsys, "--config configs/hunyuan15_1gpu_lora.yaml --gpus 1 --gpu_memory 80"
    )
    assert code == 0 and "fits 80 GB" in text and "8.33 B parameters, 56 M trained" in text
    plan = plan_of(parse(["--config", "configs/hunyuan15_1gpu_lora.yaml"]), 1)
    total = sum(row["update"] for row in memory(plan).values())
    assert re.search(rf"^total .* {total / 1e9:.1f} +\d", text, re.MULTILINE)
    assert f"{clips_per_gpu_hour(plan):.1f} clips per GPU-hour" in text


def test_command_says_how_long_a_checkpoint_takes(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, text, _ = run(
        capsys,
        "--config configs/hunyuan15_8gpu.yaml --gpus 8 --use_moving_KL True --keep_checkpoints 2",
    )
    rows = [line.split() for line in text.splitlines() if line.startswith(("checkpoint", "export"))]
    assert rows == [
        ["checkpoint", "115.9", "386", "116", "38.6"],
        ["export", "33.3", "111", "33.3", "11.1"],
    ]
    assert "Disk: 381.1 GB for 3 checkpoints (keep_checkpoints + 1) and 1 export(s)" in text
    assert "host memory: 115.9 GB on each node that writes" in text


def test_command_says_what_a_validation_costs(capsys, monkeypatch):
    """Twice the clips take twice the time; 64 clips on 1 GPU are why the recipes take fewer."""
    monkeypatch.chdir(ROOT)
    found = {}
    for count in (4, 8, 64):
        flags = f"--config configs/hunyuan15_1gpu_lora.yaml --validation_interval 96 --num_validation_prompts {count}"
        (line,) = [
            line for line in run(capsys, flags)[1].splitlines() if line.startswith("validation: ")
        ]
        assert line.endswith(
            f"{count} clips, 121 frames of 480 x 848, 50 steps, shift 5, guidance 6"
        )
        found[count] = float(line.split()[1])
    assert (
        found[8] == pytest.approx(2 * found[4], rel=0.01)
        and 3 < found[4] / 4 < 6
        and found[64] > 200
    )


@pytest.mark.parametrize(
    ("recipe", "flags", "clips", "measured"),
    [
        (
            "hunyuan15_1gpu_lora",
            "",
            8,
            {"rollout": 6.70, "anchor": 1.90, "update": 6.85, "decode": 0.85},
        ),
        (
            "hunyuan15_1gpu_lora",
            "--guidance_scale 1",
            8,
            {"rollout": 3.40, "anchor": 0.96, "update": 3.41},
        ),
        (
            "wan21_1gpu_24gb_lora",
            "",
            4,
            {"rollout": 11.08, "anchor": 2.16, "update": 9.58, "decode": 4.41},
        ),
    ],
)
def test_measured_iterations(monkeypatch, recipe, flags, clips, measured):
    """Iterations in 2026-11-17-clips-h200.md and 2026-11-17-wan-h200.md, whose windows began at steps 0 and 13."""
    monkeypatch.chdir(ROOT)
    counts = f"--batch_size {clips} --num_generations {clips} --gradient_accumulation_steps 1 --validation_videos 0"
    plan = plan_of(
        parse(["--config", f"configs/{recipe}.yaml", *counts.split(), *flags.split()]), 1
    )
    found = {phase: seconds / clips for phase, seconds in times(plan).items()}
    found["anchor"] /= plan.anchor_fraction
    start = 0 if clips == 8 else 13
    steps = start / clips + plan.windows.size + 5
    found["rollout"] *= steps * plan.micro_batches * plan.branches / plan.rollout_passes
    assert {phase: found[phase] for phase in measured} == pytest.approx(measured, rel=0.08)


def test_command_warns_of_updates_with_few_prompts_and_counts_the_hours_of_the_paper(
    capsys, monkeypatch
):
    monkeypatch.chdir(ROOT)
    text = run(capsys, "--config configs/hunyuan15_1gpu_lora.yaml")[1]
    assert "Note: " not in text and "118 GPU-hours for 25,600 clips" in text
    few = run(capsys, "--config configs/hunyuan15_1gpu_lora.yaml --gradient_accumulation_steps 4")[
        1
    ]
    assert "Note: 4 prompt(s) per update" in few


def test_command_says_what_the_whole_run_costs(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = "--config configs/hunyuan15_8gpu.yaml --gpus 8"
    lines = {
        line.partition(":")[0]: line for line in run(capsys, f"{recipe} --price 2")[1].splitlines()
    }
    plan = made("--config configs/hunyuan15_8gpu.yaml", 8)
    hours = (
        8 * (800 * sum(times(plan).values()) + 9 * validation_time(plan, 16)) / 3600
    )  # the first before training
    said = f"whole run: 800 iterations, 25,600 clips, {hours / 8 / 24:.1f} days, {hours:,.0f} GPU-hours, {2 * hours:,.0f}"
    assert lines["whole run"] == f"{said} at 2 an hour; a checkpoint every 15 min"
    assert lines["rates"] == "rates: measured on one H200"
    other = run(capsys, f"{recipe} --gpu a100 --save_minutes 0")[1]
    assert "rates: scaled from an H200 to the A100 by their data sheets, not measured" in other
    assert " an hour" not in other and "a checkpoint every 15 min" not in other


def test_a_run_without_validation_is_planned_too(capsys, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "assets" / "tiny", folder)
    (folder / "prompts_valid.txt").unlink()
    flags = f"--pretrained_model_root {folder} --dtype fp32 --batch_size 4 --validation_interval 0"
    assert "validation: 0.0 min at the end; 0 clips" in run(capsys, flags)[1]


def test_validation_ranks_share_the_clips():
    plan = made(
        "--sp_size 2 --enable_fsdp True --batch_size 4 --num_generations 4 --reward_model shapes",
        gpus=8,
    )
    assert (
        validation_time(plan, 8)
        == pytest.approx(2 * validation_time(plan, 4))
        == 2 * validation_time(plan, 1)
    )


def test_command_says_what_to_change(capsys):
    flags = "--pretrained_model_root none --enable_fsdp True --batch_size 4 --gpu_memory 80"
    code, text, _ = run(capsys, flags)
    assert code == 1 and "does NOT fit 80 GB" in text and "--use_lora True" in text
    assert run(capsys, f"{flags} --use_lora True")[0] == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--gpus 3 --sp_size 2", "sp_size is 2; it must divide the number of processes"),
        ("--gpus 3 --sp_size 3 --batch_size 4", "must divide the model's 16 heads"),
        ("--gpus 0", "gpus is 0"),
        ("--vary gpus 0", "gpus is 0"),
        ("--gpu_memory nan", "gpu_memory is nan"),
        ("--sp_sise 2", "unknown flag --sp_sise; did you mean --sp_size?"),
        ("--pretrained_transformer_version 480p_v2v", "it must be 480p_t2v, 480p_i2v, 720p_t2v"),
        ("--batch_size 4", "needs enable_fsdp True"),
    ],
)
def test_command_refuses(capsys, flags, words):
    code, _, error = run(capsys, f"--pretrained_model_root none {flags}")
    assert code == 2 and words in error


def test_sizes_come_from_the_model_folder():
    folder = ROOT / "assets" / "tiny"
    plan = plan_of(
        parse(["--pretrained_model_root", str(folder), "--dtype", "fp32", "--batch_size", "4"]), 1
    )
    assert plan.config.reward_model == ("videoalign",) and plan.config.num_frames == 9
    assert plan.latents == 3 * 6 * 6 and plan.model.parameters == pytest.approx(
        plan.trained.total, rel=0.3
    )
    assert plan.model.layers < 54


def test_full_size_counts():
    full, lora = (
        made(f"--enable_fsdp True --batch_size 4 --use_lora {value}") for value in ("False", "True")
    )
    assert full.model == lora.model and full.model.parameters == 8_326_608_160
    assert full.trained == Trained(total=8_280_954_656, matrices=8_111_783_936)
    blocks, ends = (
        54 * 8 * 32 * 2 * 2048,
        2 * 32 * 2 * 2048,
    )  # two layers of the last block lead nowhere
    assert lora.trained == Trained(total=blocks - ends, matrices=blocks - ends)


def test_several_remedies_add_up():
    plan = made("--pretrained_transformer_version 720p_t2v --num_frames 121 --batch_size 4 --keep_attention True "
                "--enable_fsdp True --micro_batch_size 1", gpus=8)  # fmt: skip
    steps = remedies(plan, 80e9)
    assert [step.flag for step in steps] == ["--keep_attention False", "--sp_size 2"]
    assert [fits(step.plan, 80e9) for step in steps] == [False, True]


def test_one_remedy_is_enough_where_it_is():
    plan = made(f"{LORA} --gather_for_rollout True")
    needed = peak(plan)[1] + plan.rates.reserve
    (change,) = remedies(plan, needed - 1e9)
    assert change.flag == "--gather_for_rollout False"
    assert change.plan.config == replace(plan.config, gather_for_rollout=False)


def test_comparison_has_a_line_for_each_value(capsys):
    flags = f"--pretrained_model_root none {LORA} --gpu_memory 44 --vary num_frames 49 81 241"
    code, text, _ = run(capsys, flags)
    rows = [line.split() for line in text.splitlines()[1:]]
    assert code == 0 and [row[:2] for row in rows] == [
        ["49", "11,304"],
        ["81", "18,168"],
        ["241", "52,488"],
    ]
    assert [row[3] for row in rows] == ["yes", "yes", "no"]


def test_the_table_of_recipes_is_what_the_planner_says():
    """Peak and time of an iteration, for each recipe of docs/scaling.md."""
    rows = re.findall(
        r"^\| \[.*?\]\(\.\./(configs/\S+)\).*\| (\d+) GB \| (.*) \|$",
        (ROOT / "docs" / "scaling.md").read_text(),
        re.M,
    )
    assert len(rows) > 5
    for path, gigabytes, text in rows:
        planned = plan_of(config := parse(["--config", str(ROOT / path)]), config.gpus)
        seconds = [
            f"{sum(times(planned, overlap=overlap).values()):.0f} s" for overlap in (True, False)
        ]
        told = seconds[0] if config.gpus == 1 else "{}, {} if nothing overlaps".format(*seconds)
        assert (path, gigabytes, text) == (path, f"{peak(planned)[1] / 1e9:.0f}", told)
