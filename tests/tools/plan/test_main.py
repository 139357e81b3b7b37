"""The planner's command line: what it prints, and its exit codes."""

import re
import shlex
import shutil

import pytest

from sage_grpo.config.parse import parse
from sage_grpo.tools.plan import __main__ as program
from sage_grpo.tools.plan.calibration import GPU_MODELS
from sage_grpo.tools.plan.memory import memory
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.tools.plan.times import clips_per_gpu_hour, times, validation_time
from tests.programs import exit_code
from tests.tools.plan.full_size import LORA, ROOT, full_size_plan

ONE_GPU = "--config configs/hunyuan15_1gpu_lora.yaml"
EIGHT_GPUS = "--config configs/hunyuan15_8gpu.yaml --gpus 8"


@pytest.fixture
def run(capsys, monkeypatch):
    """Exit code, output and errors of a command."""
    monkeypatch.chdir(ROOT)

    def called(command: str) -> tuple[int, str, str]:
        code = exit_code(program.main, shlex.split(command))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return called


def test_a_recipe_fits(run):
    code, text, _ = run(f"{ONE_GPU} --gpus 1 --gpu_memory 80")
    assert code == 0 and "fits 80 GB" in text and "8.33 B parameters, 56 M trained" in text
    plan = plan_of(parse(ONE_GPU.split()), 1)
    total = sum(part["update"] for part in memory(plan).values())
    assert re.search(rf"^total .* {total / 1e9:.1f} +\d", text, re.MULTILINE)
    assert f"{clips_per_gpu_hour(plan):.1f} clips per GPU-hour" in text


def test_a_run_that_does_not_fit_gets_remedies(run):
    flags = "--pretrained_model_root none --enable_fsdp True --batch_size 4 --gpu_memory 80"
    code, text, _ = run(flags)
    assert code == 1 and "does NOT fit 80 GB" in text and "--use_lora True" in text
    code, text, _ = run(f"{flags} --use_lora True")
    assert code == 0 and "does NOT fit" not in text


@pytest.mark.parametrize("name", GPU_MODELS)
def test_a_card_brings_its_memory(run, name):
    """A peak of 50 GB fits the large cards; for a smaller one, the planner proposes flags that make it fit."""
    code, text, _ = run(f"{ONE_GPU} --gpu {name}")
    gb = GPU_MODELS[name].memory / 1e9
    fits_card = gb >= 80
    assert code == (0 if fits_card else 1)
    assert f"{'fits' if fits_card else 'does NOT fit'} {gb:g} GB." in text
    if fits_card:
        return
    (command,) = re.findall(r"clips per GPU-hour: (--.*)$", text, re.MULTILINE)
    code, text, _ = run(f"{ONE_GPU} --gpu {name} {command}")
    assert code == 0 and f"fits {gb:g} GB." in text


def test_memory_that_is_given_overrides_that_of_the_card(run):
    code, text, _ = run(f"{ONE_GPU} --gpu 4090 --gpu_memory 80")
    assert code == 0 and "fits 80 GB" in text and "scaled from an H200 to the 4090" in text


def test_a_card_on_which_nothing_helps(run):
    code, text, _ = run(f"{ONE_GPU} --gpu_memory 6")
    assert code == 1 and "make it fit" in text and "These together" not in text


def test_the_reward_of_a_model_folder_has_the_size_of_its_files(run):
    """Not that of the published model, 4.5 GB."""
    _, text, _ = run("--config configs/tiny_cpu.yaml")
    (row,) = [line.split() for line in text.splitlines() if line.startswith("reward  ")][:1]
    assert row[1:] == ["0.0"] * 8


def test_waiting_for_the_costliest_window_is_named(run):
    _, text, _ = run(f"{EIGHT_GPUS} --sde_window random:2")
    (line,) = [line for line in text.splitlines() if "whose window costs most" in line]
    seconds, *_ = line.split()
    _, shared, _ = run(f"{EIGHT_GPUS} --sde_window random_iteration:2")
    assert "whose window costs most" not in shared

    def rollout(text: str) -> float:
        (row,) = [line.split() for line in text.splitlines() if line.startswith("rollout ")]
        return float(row[1])

    assert float(seconds) == pytest.approx(rollout(text) - rollout(shared), abs=0.2)


def test_how_long_a_checkpoint_takes(run):
    _, text, _ = run(f"{EIGHT_GPUS} --use_moving_KL True --keep_checkpoints 2")
    rows = [line.split() for line in text.splitlines() if line.startswith(("checkpoint", "export"))]
    assert rows == [
        ["checkpoint", "115.9", "386", "116", "38.6"],
        ["export", "33.3", "111", "33.3", "11.1"],
    ]
    assert "Disk: 381.1 GB for 3 checkpoints (keep_checkpoints + 1) and 1 export(s)" in text
    assert "Host memory: 165.6 GB on each node" in text


def test_what_a_validation_costs(run):
    """Twice the clips take twice the time; 64 clips as the model is meant to be sampled would take four hours."""
    meant = "--validate_video_length 121 --validation_fixed_size 480x848 --validation_num_inference_steps 50"
    minutes = {}
    for clips in (4, 8, 64):
        _, text, _ = run(f"{ONE_GPU} {meant} --num_validation_prompts {clips}")
        (line,) = [line for line in text.splitlines() if line.startswith("validation: ")]
        sampling = "121 frames of 480 x 848, 50 steps, shift 5, guidance 6"
        assert line.endswith(f"{clips} clips, {sampling}")
        minutes[clips] = float(line.split()[1])
    assert minutes[8] == pytest.approx(2 * minutes[4], rel=0.01)
    assert 3 < minutes[4] / 4 < 6
    assert minutes[64] > 200


def test_few_prompts_and_the_hours_of_the_paper(run):
    _, text, _ = run(ONE_GPU)
    assert "Note: " not in text and "118 GPU-hours for 25,600 clips" in text
    _, text, _ = run(f"{ONE_GPU} --gradient_accumulation_steps 4")
    assert "Note: 4 prompt(s) per update" in text


def test_what_the_whole_run_costs(run):
    _, text, _ = run(f"{EIGHT_GPUS} --price 2")
    lines = {line.partition(":")[0]: line for line in text.splitlines()}
    plan = full_size_plan("--config configs/hunyuan15_8gpu.yaml", gpus=8)
    # The first of 21 validations is before training.
    hours = (800 * sum(times(plan).values()) + 21 * validation_time(plan, 64)) / 3600
    assert lines["whole run"] == (
        f"whole run: 800 iterations, 25,600 clips, {hours / 24:.1f} days, {8 * hours:,.0f} GPU-hours, "
        f"{2 * 8 * hours:,.0f} at 2 an hour; a checkpoint every 15 min"
    )
    assert lines["rates"] == "rates: measured on one H200"


def test_another_gpu_and_no_price(run):
    _, text, _ = run(f"{EIGHT_GPUS} --gpu a100 --save_minutes 0")
    assert "rates: scaled from an H200 to the A100 by their data sheets, not measured" in text
    assert " an hour" not in text and "a checkpoint every 15 min" not in text


def test_a_run_without_validation_is_planned_too(run, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "assets" / "tiny", folder)
    (folder / "prompts_valid.txt").unlink()
    _, text, _ = run(
        f"--pretrained_model_root {folder} --dtype fp32 --batch_size 4 --validation_interval 0"
    )
    assert "validation: 0.0 min at the end; 0 clips" in text


def test_a_comparison_has_a_line_for_each_value(run):
    code, text, _ = run(
        f"--pretrained_model_root none {LORA} --gpu_memory 44 --vary num_frames 49 81 241"
    )
    header, *rows = [line.split() for line in text.splitlines()]
    assert code == 0 and header[0] == "num_frames"
    assert [row[:2] for row in rows] == [["49", "11,304"], ["81", "18,168"], ["241", "52,488"]]
    assert [row[3] for row in rows] == ["yes", "yes", "no"]


def test_the_number_of_gpus_can_vary(run):
    code, text, _ = run(f"{EIGHT_GPUS} --vary gpus 8 16")
    _, *rows = [line.split() for line in text.splitlines()]
    assert code == 0 and [(row[0], row[6]) for row in rows] == [("8", "32"), ("16", "64")]


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
def test_what_cannot_run_is_refused(run, flags, words):
    code, _, error = run(f"--pretrained_model_root none {flags}")
    assert code == 2 and words in error
