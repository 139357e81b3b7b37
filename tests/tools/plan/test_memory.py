"""Bytes of each part, counted by hand for a small imaginary model; checkpoints as real runs write them."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from sage_grpo.config.fields import Config
from sage_grpo.config.parse import from_values
from sage_grpo.models.cost import TILED, UNTILED
from sage_grpo.models.lora import LORA_FILE
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.tools.plan.calibration import calibrate
from sage_grpo.tools.plan.memory import (
    MOMENTS,
    bytes_by_moment,
    checkpoint_bytes,
    disk_bytes,
    export_bytes,
    fits,
    host_bytes,
    memory,
    peak,
    snapshot_bytes,
)
from sage_grpo.tools.plan.model import Plan
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.train.build import build_trainer
from tests.smallest_run import slow
from tests.tools.plan.imaginary import MODEL, TRAINED

FULL = Config(
    enable_fsdp=True, batch_size=2, num_generations=2, num_sampling_steps=3, reward_model=("videoalign",), dtype="bf16",
    guidance_scale=6.0, timestep_shift=5.0, num_frames=9, height=32, width=48, ema_decay=0.9, report_to=("none",),
    reduce_once=False, micro_batch_size=1, validate_video_length=9, validation_fixed_size="32x48",
)  # fmt: skip
LORA = replace(FULL, use_lora=True, reduce_once=None)
REPLICATED = {"enable_fsdp": False, "master_weight_type": "bf16"}
NO_ANCHOR = {"kl_weight": 0.0, "use_dual_kl": False}
TRAINED_HERE = 1200 / 4  # parameters on each of 4 GPUs


def imaginary_plan(config: Config = FULL, gpus: int = 4, **flags: object) -> Plan:
    return Plan(replace(config, **flags), MODEL, TRAINED, gpus, text_tokens=2)


def part(name: str, config: Config = FULL, **flags: object) -> dict[str, float]:
    """Bytes of a part at each moment."""
    return memory(imaginary_plan(config, **flags))[name]


def test_a_part_has_a_base_and_more_at_some_moments():
    assert bytes_by_moment(1.0, reward=2.0) == dict.fromkeys(MOMENTS, 1.0) | {"reward": 3.0}


def test_all_weights_are_fp32_and_sharded():
    assert part("weights") == bytes_by_moment(4 * 1600 / 4)
    assert part("weights", dp_replicate=2) == bytes_by_moment(4 * 1600 / 2)


def test_adapters_beside_a_bf16_model():
    assert part("weights", LORA) == bytes_by_moment(2 * 1600 / 4 + 4 * TRAINED_HERE)
    swapped = bytes_by_moment(4 * TRAINED_HERE, anchor=4 * TRAINED_HERE)
    assert part("anchor", LORA) == swapped
    assert part("anchor", LORA, reference_mode_offload=True) == swapped


def test_averages_and_an_old_policy():
    """While averaged weights are validated, or nft's old policy samples, the trained one is kept beside them."""
    copy = 4 * TRAINED_HERE
    validated = {"validation": copy, "validation_decode": copy}
    assert part("EMA") == bytes_by_moment(copy, **validated)
    assert part("EMA", algorithm="nft") == bytes_by_moment(2 * copy, rollout=copy, **validated)
    assert part("EMA", algorithm="nft", ema_decay=0.0) == bytes_by_moment(copy, rollout=copy)
    in_bf16 = part("EMA", master_weight_type="bf16")
    assert in_bf16 == bytes_by_moment(copy, validation=copy / 2, validation_decode=copy / 2)


def test_moments_of_the_optimizer():
    assert part("optimizer") == bytes_by_moment(4 * 2 * TRAINED_HERE, step=4 * TRAINED_HERE)
    matrices, others = 1000 / 4, 200 / 4
    assert part("optimizer", optimizer="muon") == bytes_by_moment(
        4 * (matrices + 2 * others), step=4 * others
    )


def test_anchor_is_bf16_and_keeps_the_policy_meanwhile():
    assert part("anchor") == bytes_by_moment(2 * TRAINED_HERE, anchor=4 * TRAINED_HERE)
    assert part("anchor", reference_mode_offload=True) == bytes_by_moment(0)
    assert part("anchor", **NO_ANCHOR) == bytes_by_moment(0)


def test_gathered_weights():
    two_blocks = 2 * (1600 - 3 * 240)  # and what is in no block
    everything = 2 * 1600
    assert part("gathered weights") == bytes_by_moment(
        0, rollout=two_blocks, anchor=two_blocks, validation=two_blocks, update=two_blocks
    )
    assert part("gathered weights", gather_for_rollout=True) == bytes_by_moment(
        0, rollout=everything, anchor=everything, validation=everything, update=two_blocks
    )
    assert part("gathered weights", **REPLICATED) == bytes_by_moment(0)


def test_gradients():
    here = 4 * TRAINED_HERE
    two_blocks = 4 * 1200 * 2 / 5
    everything = 4 * 1200
    assert part("gradients") == bytes_by_moment(0, update=here + two_blocks, step=here)
    assert part("gradients", reduce_once=True) == bytes_by_moment(
        0, update=here + everything, step=here
    )
    assert part("gradients", gradient_accumulation_steps=2) == bytes_by_moment(
        here, update=two_blocks
    )
    assert part("gradients", **REPLICATED) == bytes_by_moment(0, update=2 * 1200, step=2 * 2 * 1200)


def test_activations():
    rates = calibrate()
    tokens = 3 * 2 * 3 + 2
    assert imaginary_plan().tokens == tokens
    unit = tokens * 64 * 2
    inner = rates.training_activations.eager * unit
    two_branches = 2 * 5 * unit  # the inputs of five blocks
    attention_kept = 2 * 5 * (2 * unit + tokens * 4 * 4)
    half_saved = 2 * 5 * unit * (0.5 + 0.5 * rates.saved_activations)

    def update(**flags: object) -> float:
        return part("activations", **flags)["update"]

    assert update() == pytest.approx(two_branches + inner)
    assert update(guidance_scale=1.0) == pytest.approx(two_branches / 2 + inner)
    assert update(algorithm="awm") == pytest.approx(two_branches / 2 + inner)  # it trains one
    assert update(keep_attention=True) == pytest.approx(attention_kept + inner)
    assert update(checkpointing_fraction=0.5) == pytest.approx(half_saved + inner)
    exchange = rates.exchange_activations * unit
    assert update(sp_size=2) == pytest.approx((two_branches + inner + exchange) / 2)

    forward = rates.forward_activations
    assert part("activations")["rollout"] == pytest.approx(forward.eager * unit)
    assert part("activations", compile=True)["rollout"] == pytest.approx(forward.compiled * unit)


def test_a_validation_clip_has_its_own_size():
    forward = calibrate().forward_activations.eager
    tokens = 5 * 2 * 3 + 2
    validated = part("activations", micro_batch_size=2, validate_video_length=17)["validation"]
    assert validated == pytest.approx(forward * tokens * 64 * 2)
    assert part("VAE", validate_video_length=17)["validation_decode"] == 2 * 100 + TILED * 17


def test_trajectories():
    latents = 18 * 32 * 4 * 2  # bytes of two clips
    states, velocities = 3 + 2, 3  # the final latents are a state, too
    assert part("trajectories") == bytes_by_moment((states + 2 * velocities) * latents)
    assert part("trajectories", **NO_ANCHOR) == bytes_by_moment((states + velocities) * latents)
    assert part("trajectories", sde_window="random_iteration:1") == bytes_by_moment(
        (3 + 1 + 1) * latents
    )
    # states, targets and two velocities at two of three trained levels, and the final latents
    matched = part("trajectories", algorithm="awm", timestep_fraction=0.7)
    assert matched == bytes_by_moment((4 * 2 + 1) * latents)


def test_trajectories_of_clips_that_are_not_trained_end_with_the_reward():
    groups = {"batch_size": 4, "num_generations": 4, "train_clips": 2, "algorithm": "awm"}
    latents = 18 * 32 * 4 * 4  # bytes of four clips
    trained = (4 * 3 + 1) * latents / 2
    assert part("trajectories", **groups) == bytes_by_moment(
        0, rollout=latents, decode=latents, reward=latents, anchor=latents + trained, update=trained
    )


def test_the_vae_decodes_in_tiles_if_its_memory_exceeds_the_limit():
    weights = 2 * 100
    untiled = 18 * UNTILED.eager
    in_tiles = bytes_by_moment(weights, decode=TILED * 9, validation_decode=TILED * 9)
    assert part("VAE") == in_tiles
    whole = bytes_by_moment(weights, decode=untiled, validation_decode=untiled)
    assert part("VAE", decode_gb=untiled / 1e9) == whole
    assert part("VAE", decode_gb=0.03) == in_tiles


def test_rewards():
    videoalign = calibrate().rewards["videoalign"]
    assert part("reward") == bytes_by_moment(
        videoalign.weight_bytes, reward=videoalign.forward_bytes
    )
    assert part("reward", reward_model=("shapes",)) == bytes_by_moment(0)


def test_peak_is_the_fullest_moment_and_needs_a_reserve():
    plan = imaginary_plan()
    parts = memory(plan).values()
    totals = {moment: sum(part[moment] for part in parts) for moment in MOMENTS}
    largest = max(totals.values())
    assert peak(plan) == ("reward", largest)
    needed = largest + plan.rates.reserve
    assert fits(plan, needed) and not fits(plan, needed - 1)


RUN = {
    "reward_model": "shapes", "batch_size": 2, "num_generations": 2, "num_sampling_steps": 1, "num_frames": 5,
    "height": 16, "width": 16, "guidance_scale": 1.0, "max_steps": 1, "validation_num_inference_steps": 1,
    "report_to": "none", "kl_weight": 0.1, "dtype": "fp32", "lora_r": 16,
}  # fmt: skip


def stored_bytes(files):
    """Bytes of the tensors in safetensors files."""
    opened = [safe_open(file, "pt") for file in files]
    return sum(file.get_tensor(name).nbytes for file in opened for name in file.keys())  # noqa: SIM118


@pytest.mark.parametrize(
    "changes",
    [
        {"use_lora": True},
        slow({"use_lora": True, "ema_decay": 0.9, **NO_ANCHOR}),
        slow({"ema_decay": 0.9}),
        {"algorithm": "nft"},
        slow({"optimizer": "muon", **NO_ANCHOR}),
        slow({"master_weight_type": "bf16", "dtype": "bf16"}),
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
    plan = imaginary_plan()
    checkpoint = 1200 * (3 * 4 + 2 + 4)  # weights and moments, the anchor in bf16, the average
    export = 4 * 1600
    assert checkpoint_bytes(FULL, TRAINED) == checkpoint
    assert export_bytes(plan) == export
    assert disk_bytes(plan) == 4 * checkpoint + export
    exported = imaginary_plan(keep_checkpoints=1, export_interval=5)
    assert disk_bytes(exported) == 2 * (checkpoint + export)

    lora = imaginary_plan(LORA)
    assert disk_bytes(lora) == 4 * 1200 * 6 * 4 and export_bytes(lora) == 0

    assert snapshot_bytes(plan) == checkpoint
    assert snapshot_bytes(imaginary_plan(async_save=False)) == 0
    assert snapshot_bytes(imaginary_plan(gpus=16)) == checkpoint / 2
    assert snapshot_bytes(imaginary_plan(gpus=16, dp_replicate=4)) == checkpoint


@pytest.mark.parametrize(
    ("flags", "parameters"),
    [
        ({}, 0),
        ({"reference_mode_offload": True}, 1200),
        ({"reference_mode_offload": True, "gpus": 16}, 1200 / 2),
        ({"reference_mode_offload": True, "gpus": 16, "dp_replicate": 2}, 1200),
        ({"reference_mode_offload": True, **NO_ANCHOR}, 0),
        ({"reference_mode_offload": True, "config": LORA}, 0),
    ],
)
def test_a_node_keeps_the_offloaded_anchor_and_the_weights_that_it_replaces(flags, parameters):
    """The anchor in bf16 and, while it runs, the policy in fp32, besides the copy of a checkpoint."""
    plan = imaginary_plan(**flags)
    assert host_bytes(plan) - snapshot_bytes(plan) == parameters * (2 + 4)


def test_of_two_transformers_one_is_on_the_gpu_unless_they_are_sharded():
    """Blocks of both are in host memory, and what is outside of them is on the GPU."""
    two = replace(MODEL, experts=2, boundary=0.9)
    ordered = {"enable_timestep_permutation": False}

    def plan(config: Config, **flags: object) -> Plan:
        return Plan(replace(config, **flags), two, TRAINED, 4, text_tokens=2)

    turns = plan(LORA, enable_fsdp=False)
    in_blocks = 5 * 240
    assert memory(turns)["weights"] == bytes_by_moment(2 * (2 * 1600 - in_blocks) + 4 * 1200)
    assert host_bytes(turns) - snapshot_bytes(turns) == 4 * 2 * 2 * in_blocks

    sharded = plan(LORA, **ordered)
    assert memory(sharded)["weights"] == bytes_by_moment(2 * 2 * 1600 / 4 + 4 * TRAINED_HERE)
    outside = 1600 - in_blocks
    assert memory(sharded)["gathered weights"]["update"] == 2 * (2 * outside + 2 * 240)
    assert host_bytes(sharded) == snapshot_bytes(sharded)

    all_weights = plan(FULL, **ordered)
    assert export_bytes(all_weights) == 2 * export_bytes(imaginary_plan())


@pytest.mark.parametrize("compiled", [False, True])
def test_fp32_adapters_copy_what_they_read_unless_they_are_cast_instead(compiled):
    two = replace(MODEL, experts=2, boundary=0.9)

    def activations(**flags: object) -> dict[str, float]:
        flags = {"enable_fsdp": False, "compile": compiled, **flags}
        plan = Plan(replace(LORA, **flags), two, TRAINED, 4, text_tokens=2)
        return memory(plan)["activations"]

    plan = imaginary_plan(config=LORA)
    unit = plan.tokens * LORA.trained_micro_batch * 64 * 2
    copied = activations()
    plain = activations(master_weight_type="bf16")
    assert copied["rollout"] - plain["rollout"] == 4 * unit
    assert copied["anchor"] - plain["anchor"] == 4 * unit
    assert copied["update"] - plain["update"] == (4 if compiled else 11) * unit
    sharded = {"enable_fsdp": True, "enable_timestep_permutation": False}
    assert activations(**sharded) == activations(**sharded, master_weight_type="bf16") == plain
