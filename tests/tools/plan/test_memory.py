"""Bytes of each part, counted by hand for a small imaginary model; checkpoints as real runs write them."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from sage_grpo.config.fields import Config
from sage_grpo.config.parse import from_values
from sage_grpo.models.cost import TILED, UNTILED, Architecture
from sage_grpo.models.lora import LORA_FILE
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.tools.plan.calibration import calibrate
from sage_grpo.tools.plan.memory import (
    MOMENTS,
    activations,
    checkpoint_bytes,
    disk_bytes,
    export_bytes,
    fits,
    gathered,
    gradients,
    memory,
    peak,
    snapshot_bytes,
)
from sage_grpo.tools.plan.model import Plan, Trained
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.train.build import build_trainer

MODEL = Architecture(layers=5, heads=4, width=64, mlp_ratio=4, parameters=1600, block=240, vae=100)
TRAINED = Trained(total=1200, matrices=1000)
FULL = Config(
    enable_fsdp=True, batch_size=2, num_generations=2, num_sampling_steps=3, reward_model=("videoalign",), dtype="bf16",
    guidance_scale=6.0, timestep_shift=5.0, num_frames=9, height=32, width=48, ema_decay=0.9, report_to=("none",),
    reduce_once=False, micro_batch_size=1, validate_video_length=9, validation_fixed_size="32x48",
)  # fmt: skip
LORA = replace(FULL, use_lora=True, reduce_once=None)


def made(config: Config = FULL, gpus: int = 4, **flags: object) -> Plan:
    return Plan(replace(config, **flags), MODEL, TRAINED, gpus, text_tokens=2)


def part(name: str, *arguments: object, **flags: object) -> list[float]:
    row = memory(made(*arguments, **flags))[name]
    return [row[moment] for moment in MOMENTS]


def test_all_weights_are_fp32_and_in_parts():
    assert part("weights") == [4 * 1600 / 4] * 6
    assert part("EMA") == [4 * 1200 / 4] * 6
    assert part("EMA", algorithm="nft") == [
        3 * 1200,
        *[2 * 1200] * 5,
    ]  # its old policy; in the rollout the trained one too
    assert part("weights", dp_replicate=2) == [4 * 1600 / 2] * 6
    assert part("optimizer") == [2 * 4 * 300] * 5 + [3 * 4 * 300]
    assert part("optimizer", optimizer="muon") == [4 * (250 + 2 * 50)] * 5 + [4 * (250 + 3 * 50)]


def test_adapters_beside_a_bf16_model():
    assert part("weights", LORA) == [2 * 1600 / 4 + 4 * 300] * 6
    swapped = [4 * 300] * 3 + [8 * 300] + [4 * 300] * 2
    assert part("anchor", LORA) == swapped == part("anchor", LORA, reference_mode_offload=True)


def test_anchor_is_bf16_and_keeps_the_policy_meanwhile():
    assert part("anchor") == [600, 600, 600, 600 + 1200, 600, 600]
    assert (
        part("anchor", reference_mode_offload=True)
        == part("anchor", kl_weight=0.0, use_dual_kl=False)
        == [0] * 6
    )


def test_gathered_weights():
    few = 2 * (1600 - 3 * 240)  # two blocks, and what is in none
    assert list(gathered(made()).values()) == [few, 0, 0, few, few, 0]
    assert list(gathered(made(gather_for_rollout=True)).values()) == [
        2 * 1600,
        0,
        0,
        2 * 1600,
        few,
        0,
    ]
    alone = made(enable_fsdp=False, master_weight_type="bf16")
    assert not any(gathered(alone).values())


def test_gradients():
    assert list(gradients(made()).values()) == [0, 0, 0, 0, 1200 + 4 * 1200 * 2 / 5, 1200]
    assert list(gradients(made(reduce_once=True)).values()) == [0, 0, 0, 0, 1200 + 4 * 1200, 1200]
    kept = gradients(made(gradient_accumulation_steps=2))
    assert list(kept.values()) == [1200] * 4 + [1200 + 4 * 1200 * 2 / 5, 1200]
    alone = made(enable_fsdp=False, master_weight_type="bf16")
    assert list(gradients(alone).values()) == [0, 0, 0, 0, 2 * 1200, 4 * 1200]


def test_activations():
    tokens = 3 * 2 * 3 + 2
    unit = tokens * 64 * 2
    rates = calibrate()
    inner = rates.training_activations.eager
    assert made().tokens == tokens
    assert activations(made())["update"] == pytest.approx(
        2 * 5 * unit + inner * unit
    )  # two branches, five blocks
    assert activations(made(guidance_scale=1.0))["update"] == pytest.approx(5 * unit + inner * unit)
    assert activations(made(algorithm="awm"))["update"] == pytest.approx(
        5 * unit + inner * unit
    )  # trains one
    kept = 2 * 5 * (2 * unit + tokens * 4 * 4)
    assert activations(made(keep_attention=True))["update"] == pytest.approx(kept + inner * unit)
    saved = 2 * 5 * unit * (0.5 + 0.5 * rates.saved_activations)
    assert activations(made(checkpointing_fraction=0.5))["update"] == pytest.approx(
        saved + inner * unit
    )
    assert activations(made())["rollout"] == pytest.approx(rates.forward_activations.eager * unit)
    assert activations(made(compile=True))["rollout"] == pytest.approx(
        rates.forward_activations.compiled * unit
    )
    halved = activations(made(sp_size=2))["update"]
    assert halved == pytest.approx((2 * 5 + inner + rates.exchange_activations) * unit / 2)


def test_trajectories_and_the_small_models():
    states = 5 + 3 + 3  # states and the result, velocities of policy and anchor
    assert part("trajectories") == [states * 18 * 32 * 4 * 2] * 6
    assert part("trajectories", kl_weight=0.0, use_dual_kl=False) == [(5 + 3) * 18 * 32 * 4 * 2] * 6
    assert (
        part("trajectories", sde_window="random_iteration:1") == [(3 + 1 + 1) * 18 * 32 * 4 * 2] * 6
    )
    matched = (
        4 * 2 + 1
    )  # states, targets and velocities at two of three trained levels, and the result
    assert (
        part("trajectories", algorithm="awm", timestep_fraction=0.7)
        == [matched * 18 * 32 * 4 * 2] * 6
    )
    assert part("VAE") == [200, 200 + TILED * 9, 200, 200, 200, 200]
    untiled, positions = 200 + 18 * UNTILED[1], 3 * 2 * 3
    assert part("VAE", decode_gb=positions * UNTILED[1] / 1e9) == [200, untiled, 200, 200, 200, 200]
    assert part("VAE", decode_gb=0.03)[1] == 200 + TILED * 9
    videoalign = calibrate().rewards["videoalign"]
    loaded = videoalign.weight_bytes
    scoring = loaded + videoalign.forward_bytes
    assert part("reward") == [loaded, loaded, scoring, loaded, loaded, loaded]
    assert part("reward", reward_model=("shapes",)) == [0] * 6


def test_peak_is_the_fullest_moment_and_needs_a_reserve():
    plan = made()
    totals = {moment: sum(row[moment] for row in memory(plan).values()) for moment in MOMENTS}
    assert peak(plan) == ("reward", totals["reward"]) and totals["reward"] == max(totals.values())
    reserve = plan.rates.reserve
    assert fits(plan, totals["reward"] + reserve) and not fits(plan, totals["reward"] + reserve - 1)


RUN = {
    "reward_model": "shapes", "batch_size": 2, "num_generations": 2, "num_sampling_steps": 1, "num_frames": 5,
    "height": 16, "width": 16, "guidance_scale": 1.0, "max_steps": 1, "validation_num_inference_steps": 1,
    "report_to": "none", "kl_weight": 0.1, "dtype": "fp32", "lora_r": 16,
}  # fmt: skip
ALONE = {"kl_weight": 0.0, "use_dual_kl": False}


def stored_bytes(files):
    """Bytes of the tensors in safetensors files."""
    opened = [safe_open(file, "pt") for file in files]
    return sum(file.get_tensor(name).nbytes for file in opened for name in file.keys())  # noqa: SIM118


@pytest.mark.parametrize(
    "changes",
    [
        {"use_lora": True},
        {"use_lora": True, "ema_decay": 0.9, **ALONE},
        {"ema_decay": 0.9},
        {"algorithm": "nft"},
        {"optimizer": "muon", **ALONE},
        {"master_weight_type": "bf16", "dtype": "bf16"},
    ],
)
def test_checkpoints_have_the_size_that_was_planned(tiny_folder, tmp_path, changes):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle moving left\n")
    places = {"pretrained_model_root": str(tiny_folder), "output_dir": str(tmp_path / "run")}
    places |= {"train_prompts": str(prompts), "validation_prompts": str(prompts)}
    config = from_values(RUN | places | changes)
    build_trainer(config, Ranks(0, 1, torch.device("cpu"))).train()
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    adapter = [folder / LORA_FILE] if config.use_lora else []
    plan = plan_of(config, 1)
    written = stored_bytes([*(folder / "trainer").glob("rank-*.safetensors"), *adapter])
    assert checkpoint_bytes(plan.config, plan.trained) == pytest.approx(written, rel=0.02)
    assert export_bytes(plan) == pytest.approx(
        stored_bytes((folder / "transformer").glob("*.safetensors")), rel=0.02
    )


def test_disk_and_host_memory_of_checkpoints():
    one = 1200 * (3 * 4 + 2 + 4)  # weights and moments, the anchor in bf16, the average
    assert checkpoint_bytes(FULL, TRAINED) == one and export_bytes(made()) == 4 * 1600
    assert disk_bytes(made()) == 4 * one + 4 * 1600
    assert disk_bytes(made(keep_checkpoints=1, export_interval=5)) == 2 * (one + 4 * 1600)
    assert disk_bytes(made(LORA)) == 4 * 1200 * 6 * 4 and export_bytes(made(LORA)) == 0
    assert snapshot_bytes(made()) == one and snapshot_bytes(made(async_save=False)) == 0
    assert (
        snapshot_bytes(made(gpus=16)) == one / 2
        and snapshot_bytes(made(gpus=16, dp_replicate=4)) == one
    )
