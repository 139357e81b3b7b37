"""The planner on the full-size model: measured settings, most of which it was not calibrated on."""

import pytest

from sage_grpo.config.parse import parse
from sage_grpo.models.cost import BACKWARD_OF_ATTENTION, Architecture
from sage_grpo.tools.plan.calibration import calibrate
from sage_grpo.tools.plan.memory import memory, peak
from sage_grpo.tools.plan.model import Plan, TrainedParameters
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.tools.plan.times import backward_time, forward_time, times, validation_time
from tests.tools.plan.full_size import LORA, ROOT, full_size_plan

GIB = 2**30
# research/benchmarks/results/2026-11-15-planner-figures.md: forward and backward of one clip of this size
CLIP = "--num_frames 81 --height 480 --width 848"


def training_time(plan: Plan) -> float:
    return forward_time(plan) + backward_time(plan)


@pytest.mark.parametrize(
    ("compiled", "forward", "both"), [(True, 1.240, 4.281), (False, 1.554, 5.477)]
)
def test_measurements_of_the_calibration_come_back(compiled, forward, both):
    plan = full_size_plan(f"{LORA} {CLIP} --compile {compiled} --keep_attention True")
    assert plan.tokens == 33_540
    assert forward_time(plan) == pytest.approx(forward, rel=0.03)
    assert training_time(plan) == pytest.approx(both, rel=0.03)


@pytest.mark.parametrize(("compiled", "seconds"), [(True, 5.140), (False, 6.345)])
def test_held_out_training_with_recomputed_attention(compiled, seconds):
    plan = full_size_plan(f"{LORA} {CLIP} --compile {compiled}")
    assert training_time(plan) == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(("kept", "seconds"), [(False, 5.393), (True, 4.554)])
def test_held_out_training_of_all_weights(kept, seconds):
    plan = full_size_plan(f"{LORA} --use_lora False {CLIP} --compile True --keep_attention {kept}")
    assert training_time(plan) == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(("compiled", "seconds"), [(False, 2.910), (True, 2.268)])
def test_held_out_forward_of_121_frames(compiled, seconds):
    plan = full_size_plan(f"{LORA} --num_frames 121 --height 480 --width 848 --compile {compiled}")
    assert plan.tokens == 49_440
    assert forward_time(plan) == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(
    ("tokens", "forward", "both"), [(49_440, 34.7e-3, 127e-3), (18_168, 4.4e-3, 17.3e-3)]
)
def test_held_out_attention(tokens, forward, both):
    one_block = Architecture(
        layers=1, heads=16, width=16 * 128, mlp_ratio=4, parameters=0, block=0, vae=0
    )
    flops = one_block.forward(tokens, 0).attention
    rates = calibrate()
    predicted = flops / rates.attention
    assert predicted == pytest.approx(forward, rel=0.15)
    backward = flops * BACKWARD_OF_ATTENTION / rates.attention_backward
    assert predicted + backward == pytest.approx(both, rel=0.15)


@pytest.mark.parametrize(("compiled", "measured"), [(True, 33.5 * GIB), (False, 34.0 * GIB)])
def test_held_out_memory_of_kept_attention(compiled, measured):
    parts = memory(full_size_plan(f"{LORA} {CLIP} --keep_attention True --compile {compiled}"))
    predicted = parts["weights"]["update"] + parts["activations"]["update"]
    assert predicted == pytest.approx(measured, rel=0.05)


def test_held_out_peak_of_a_grpo_run():
    plan = full_size_plan(
        "--use_lora True --enable_fsdp True --gather_for_rollout True --keep_attention True "
        "--micro_batch_size 1 --batch_size 2 --num_generations 2 --num_sampling_steps 2 "
        "--reward_model shapes"
    )
    assert plan.branches == 2 and plan.tokens == 18_168
    _, peak_bytes = peak(plan)
    assert peak_bytes == pytest.approx(38.7e9, rel=0.15)


def test_held_out_grpo_iteration():
    plan = full_size_plan(
        "--use_lora True --enable_fsdp True --gather_for_rollout True --keep_attention True "
        "--compile True --micro_batch_size 1 --batch_size 4 --num_generations 4 "
        "--timestep_fraction 0.25 --reward_model shapes"
    )
    seconds = times(plan)
    assert seconds["rollout"] == pytest.approx(74.3, rel=0.15)
    assert seconds["update"] == pytest.approx(67.7, rel=0.15)
    _, peak_bytes = peak(plan)
    assert peak_bytes == pytest.approx(39.5e9, rel=0.15)


# Seconds per clip in 2026-11-17-clips-h200.md and 2026-11-17-wan-h200.md, and the step at which windows began there
MEASURED_ITERATIONS = {
    "hunyuan": (
        "--config configs/hunyuan15_1gpu_lora.yaml",
        8,
        0,
        {"rollout": 6.70, "anchor": 1.90, "update": 6.85, "decode": 0.85},
    ),
    "hunyuan without guidance": (
        "--config configs/hunyuan15_1gpu_lora.yaml --guidance_scale 1",
        8,
        0,
        {"rollout": 3.40, "anchor": 0.96, "update": 3.41},
    ),
    "wan": (
        "--config configs/wan21_1gpu_24gb_lora.yaml --num_frames 81 --height 480 --width 832 "
        "--keep_attention False",
        4,
        13,
        {"rollout": 11.08, "anchor": 2.16, "update": 9.58, "decode": 4.41},
    ),
}


@pytest.mark.parametrize(
    ("flags", "clips", "window_start", "measured"),
    MEASURED_ITERATIONS.values(),
    ids=MEASURED_ITERATIONS.keys(),
)
def test_measured_iterations(monkeypatch, flags, clips, window_start, measured):
    monkeypatch.chdir(ROOT)
    batch = f"--batch_size {clips} --num_generations {clips} --gradient_accumulation_steps 1 --validation_videos 0"
    plan = plan_of(parse([*flags.split(), *batch.split()]), 1)
    seconds = {phase: value / clips for phase, value in times(plan).items()}

    # The planner averages over places of the window, and over iterations without an anchor.
    seconds["anchor"] /= plan.anchor_fraction
    steps = window_start / clips + plan.windows.size + 5
    seconds["rollout"] *= steps * plan.micro_batches * plan.branches / plan.rollout_passes
    assert {phase: seconds[phase] for phase in measured} == pytest.approx(measured, rel=0.08)


def test_decoding_is_counted_by_pixels(monkeypatch):
    """Wan 2.2 TI2V has a quarter of Wan 2.1's latent positions, each of four times the pixels."""
    monkeypatch.chdir(ROOT)
    size = ["--num_frames", "33", "--height", "320", "--width", "576"]
    plans = [
        plan_of(parse(["--config", f"configs/{name}_1gpu_24gb_lora.yaml", *size]), 1)
        for name in ("wan21", "wan22_5b")
    ]
    assert plans[0].latent_positions == 4 * plans[1].latent_positions
    assert plans[0].decode_seconds == pytest.approx(plans[1].decode_seconds)


def test_validation_ranks_share_the_clips():
    plan = full_size_plan(
        "--sp_size 2 --enable_fsdp True --batch_size 4 --num_generations 4 --reward_model shapes",
        gpus=8,
    )
    one_round = validation_time(plan, 4)
    assert validation_time(plan, 1) == one_round
    assert validation_time(plan, 8) == pytest.approx(2 * one_round)


def test_sizes_come_from_the_model_folder():
    folder = str(ROOT / "assets" / "tiny")
    plan = plan_of(
        parse(["--pretrained_model_root", folder, "--dtype", "fp32", "--batch_size", "4"]), 1
    )
    assert plan.config.reward_model == ("videoalign",) and plan.config.num_frames == 9
    assert plan.latent_positions == 3 * 6 * 6
    assert plan.model.parameters == pytest.approx(plan.trained.total, rel=0.3)
    assert plan.model.layers < 54


def test_full_size_counts():
    full = full_size_plan("--enable_fsdp True --batch_size 4")
    lora = full_size_plan("--enable_fsdp True --batch_size 4 --use_lora True")
    assert full.model == lora.model and full.model.parameters == 8_326_608_160
    assert full.trained == TrainedParameters(total=8_280_954_656, matrices=8_111_783_936)
    adapter = 32 * 2 * 2048  # of one layer, with rank 32
    unused = 2  # layers of the last block, which lead nowhere
    total = (54 * 8 - unused) * adapter
    assert lora.trained == TrainedParameters(total=total, matrices=total)
