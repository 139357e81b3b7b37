"""The short doctor: each check on a machine that passes it, and on one that does not."""

import math
import os
import re
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sage_grpo.config.parse import parse
from sage_grpo.environment import TOKEN_VARIABLE
from sage_grpo.rewards import client
from sage_grpo.tools.doctor import __main__ as doctor
from sage_grpo.tools.doctor import machine as machine_checks
from sage_grpo.tools.doctor.machine import (
    check_disk,
    check_gpus,
    check_host,
    check_reward,
    check_speed,
    machine_of,
)
from sage_grpo.tools.plan.memory import disk_bytes
from tests.programs import exit_code
from tests.rewards.serving import TOKEN, Light, answering, composite, serving

GB = 1e9
FULL = [
    "--config",
    str(Path(__file__).parents[3] / "configs" / "hunyuan15_8gpu.yaml"),
    "--pretrained_model_root",
    "gone",
]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def little(monkeypatch):
    """One block is enough to be measured."""
    monkeypatch.setattr(machine_checks, "MAX_BYTES", machine_checks.BLOCK_BYTES)


@pytest.fixture
def flags(tiny_folder, tmp_path):
    values = {
        "pretrained_model_root": tiny_folder,
        "output_dir": tmp_path / "run",
        "reward_model": "shapes",
    }
    values |= {"batch_size": 4, "dtype": "fp32", "device": "cpu"}
    return [str(word) for name, value in values.items() for word in (f"--{name}", value)]


def run_short(capsys, *words):
    """Exit code of the short doctor, and its lines as (mark, check, text)."""
    code = exit_code(doctor.main, ["--short", *map(str, words)])
    lines = capsys.readouterr().out.splitlines()
    return code, [tuple(line.split(maxsplit=2)) for line in lines]


def test_all_is_well_and_nothing_is_left_behind(capsys, flags, tmp_path):
    code, lines = run_short(capsys, *flags)
    assert code == 0
    assert [check for _, check, _ in lines] == [
        "model",
        "prompts",
        "gpus",
        "host",
        "disk",
        "speed",
        "reward",
    ]
    assert {mark for mark, _, _ in lines} == {"ok"}
    assert not list(tmp_path.iterdir())


def test_a_run_that_exists_passes_too_and_is_not_touched(capsys, flags, tmp_path):
    file = tmp_path / "run" / "checkpoints" / "step-000001" / "weights"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    code, _ = run_short(capsys, *flags)
    assert code == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


def test_what_is_wrong_is_one_line_and_exit_code_2(capsys, flags, tiny_folder, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    next((model / "text_encoder").glob("*.safetensors")).unlink()
    (tmp_path / "file").write_text("")
    paths = ["--pretrained_model_root", model, "--output_dir", tmp_path / "file" / "run"]
    code, lines = run_short(capsys, *flags, *paths)
    assert code == 2
    wrong = {check: text for mark, check, text in lines if mark == "FAIL"}
    assert list(wrong) == ["model", "speed"] and "Not a directory" in wrong["speed"]
    assert wrong["model"] == (
        f"Model folder '{model}' lacks text_encoder/*.safetensors; download_weights.sh gets what is missing."
    )


def test_prompts_must_be_readable_and_have_the_images_that_the_model_animates(
    capsys, flags, i2v_folder, pictures, tmp_path
):
    with_images = pictures[0].with_name("with_images.csv")
    with_images.write_text(f"prompt,image\na red circle,{pictures[0].name}\n")
    without_images = tmp_path / "without_images.txt"
    without_images.write_text("a red circle\n")
    model = ["--pretrained_model_root", i2v_folder]

    def verdict(train, held_out):
        """Marks of the checks that are not ok, and the text of the prompts' one."""
        files = ["--train_prompts", train, "--validation_prompts", held_out]
        code, lines = run_short(capsys, *flags, *model, *files)
        texts = {check: text for _, check, text in lines}
        return code, [check for mark, check, _ in lines if mark != "ok"], texts["prompts"]

    assert verdict(with_images, with_images) == (
        0,
        [],
        "1 to train, 1 held out, 2 of them with an image",
    )
    code, failed, text = verdict(with_images, without_images)
    assert (code, failed) == (2, ["prompts"])
    assert "animates images" in text
    code, failed, text = verdict(tmp_path / "gone.txt", with_images)
    assert (code, failed) == (2, ["prompts"])
    assert "gone.txt does not exist" in text


def test_room_counts_what_a_resumed_run_has_already(flags, tmp_path, monkeypatch):
    machine = machine_of(parse(flags), 1, 1)
    needed = disk_bytes(machine.plan)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, needed - 1))
    (wrong,) = check_disk(machine)
    assert wrong.mark == "WRONG" and f"keep_checkpoints + 1 need {needed / GB:.1f} GB" in wrong.text
    file = tmp_path / "run" / "checkpoints" / "step-000001" / "weights"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    assert [finding.mark for finding in check_disk(machine)] == ["ok"]


def test_the_full_model_needs_497_gb_of_disk_and_98_gb_of_host_memory(monkeypatch):
    """Room for 4 checkpoints of 116 GB and an export; 8 processes, the anchor, and the weights that it replaces."""
    machine = machine_of(parse([*FULL, "--keep_checkpoints", "3"]), 8, 8)
    findings = []
    for free in (97 * GB, 100 * GB, 300 * GB):
        monkeypatch.setattr(machine_checks, "available_memory", lambda free=free: int(free))
        findings += check_host(machine)
    too_little, without_copy, enough = findings
    assert [finding.mark for finding in findings] == ["WRONG", "ok", "ok"]
    assert "97 GB of host memory are free, 98 GB are needed" in too_little.text
    assert "async_save finds no 116 GB for a copy" in without_copy.text
    assert "copy" not in enough.text
    (disk,) = check_disk(machine)
    assert "keep_checkpoints + 1 need 497.0 GB" in disk.text


def test_the_write_speed_tells_how_long_a_checkpoint_takes(flags, tmp_path):
    assert machine_checks.write_speed(tmp_path, math.inf) > 0 and not list(tmp_path.iterdir())
    (fine,) = check_speed(machine_of(parse(flags), 1, 1))
    assert fine.mark == "ok" and fine.numbers["between"] is None
    assert re.search(r" GB/s: \d+ s for a checkpoint", fine.text) and "every" not in fine.text
    (slow,) = check_speed(machine_of(parse([*flags, "--save_minutes", "1e-9"]), 1, 1))
    assert slow.mark == "WRONG" and slow.text.endswith("s for a checkpoint, one every 0 s")


def test_what_is_written_reaches_the_disk_and_ends_in_time(tmp_path, monkeypatch):
    clock, synced = iter(range(100)), []
    monkeypatch.setattr(machine_checks, "MAX_BYTES", 1 << 40)
    monkeypatch.setattr(machine_checks.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(os, "fsync", synced.append)
    speed = machine_checks.write_speed(tmp_path, math.inf)
    assert speed == 2 * machine_checks.BLOCK_BYTES / 4  # a second per look: 3 s are over
    assert len(synced) == 2


def test_gpus_that_are_too_few_or_out_of_order(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (few,) = check_gpus(machine_of(parse(FULL), 8, 8))
    assert few.mark == "WRONG" and "torch finds 1 for 8 processes; NVIDIA driver " in few.text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (none,) = check_gpus(machine_of(parse(FULL), 8, 8))
    assert none.mark == "WRONG"
    assert none.text.startswith("no GPU can be used: ") and " for CUDA " in none.text


def test_every_gpu_must_compute_and_the_smallest_one_hold_the_run(monkeypatch):
    """Eight GPUs for eight processes, simulated: `torch.ones` is on the CPU, and wrong where a GPU is broken."""
    sizes, broken = [80 * GB] * 8, set()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda number: SimpleNamespace(total_memory=sizes[number]),
    )
    machine = machine_of(parse(FULL), 8, 8)
    monkeypatch.setattr(
        torch, "ones", lambda *shape, device, dtype: torch.full(shape, 1.0 + (device in broken))
    )
    assert [finding.mark for finding in check_gpus(machine)] == ["ok", "ok"]
    sizes[5] = 20 * GB
    assert [finding.mark for finding in check_gpus(machine)] == ["ok", "WRONG"]
    broken.add("cuda:3")
    wrong, _ = check_gpus(machine)
    assert wrong.mark == "WRONG" and wrong.remedy.startswith("GPUs [3] compute wrong results")


@pytest.mark.parametrize(
    ("save_interval", "save_minutes", "mark"),
    [(4, 0, "WRONG"), (40, 0, "ok"), (40, 1, "WRONG"), (0, 0, "ok")],
)
def test_a_checkpoint_must_be_written_before_the_next_one_is_due(
    monkeypatch, save_interval, save_minutes, mark
):
    """116 GB take 6 minutes; 4 iterations take 5."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine_checks, "write_speed", lambda folder, size: 0.3 * GB)
    saves = ["--save_interval", str(save_interval), "--save_minutes", str(save_minutes)]
    (finding,) = check_speed(machine_of(parse([*FULL, *saves]), 8, 8))
    assert finding.mark == mark, finding.text


def test_an_anchor_in_host_memory_is_counted(monkeypatch):
    """8 processes of 6 GB, and 8.3 billion weights in bf16 and, while they run, those of the policy in fp32."""
    monkeypatch.setattr(machine_checks, "available_memory", lambda: int(60 * GB))
    light = [*FULL, "--reward_model", "remote", "--remote_reward_url", "http://here"]
    (on_gpu,) = check_host(machine_of(parse([*light, "--reference_mode_offload", "False"]), 8, 8))
    (on_host,) = check_host(machine_of(parse([*light, "--reference_mode_offload", "True"]), 8, 8))
    assert on_gpu.mark == "ok"
    assert on_host.mark == "WRONG" and "98 GB are needed" in on_host.text


def reward_marks(words):
    try:
        return [finding.mark for finding in check_reward(machine_of(parse(words), 1, 1))]
    except (ValueError, FileNotFoundError) as error:
        return str(error)


@pytest.mark.parametrize("name", ["VideoReward", "VideoReward_split"])
def test_a_reward_folder_must_be_complete(flags, videoalign_folders, tmp_path, name):
    folder = tmp_path / name
    shutil.copytree(videoalign_folders[name], folder)
    words = [*flags, "--reward_model", "videoalign_local", "--reward_path", str(folder)]
    assert reward_marks(words) == ["ok"]
    for path in next(folder.glob("checkpoint-*")).glob("*model.safetensors"):
        path.unlink()
    assert "is missing; download that folder again" in reward_marks(words)
    (folder / "prompt_template.txt").unlink()
    assert "prompt_template.txt is missing" in reward_marks(words)
    held_out = [*flags, "--holdout_reward", "videoalign_local", "--reward_path", str(folder)]
    assert "prompt_template.txt is missing" in reward_marks(held_out)


def test_a_judge_is_asked_as_the_run_will_ask_it(flags, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    models = {"data": [{"id": "small"}, {"id": "large"}]}
    with answering(lambda handler: handler.say(200, models)) as (address, _):
        words = [*flags, "--reward_model", "judge", "--remote_reward_url", address]
        assert "serves small, large" in reward_marks(words)
        assert reward_marks([*words, "--judge_model", "large"]) == ["ok"]
        rubric = [*words, "--judge_model", "large", "--judge_rubric", "gone.txt"]
        assert "judge_rubric gone.txt cannot be read" in reward_marks(rubric)


def test_a_reward_server_must_answer(flags, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setattr(client, "PAUSES", ())
    with serving(composite({"light": Light()})) as address:
        words = [*flags, "--reward_model", "remote", "--remote_reward_url", address]
        assert reward_marks(words) == ["ok"]
    assert f"remote_reward_url {address} could not be used" in reward_marks(words)
