"""Times and traffic, counted by hand for a small imaginary model and simple rates."""

from dataclasses import asdict, replace

import pytest

from sage_grpo.algo.sde import flow_sigmas
from sage_grpo.tools.plan.calibration import Calibration, Overhead, calibrate
from sage_grpo.tools.plan.model import Plan
from sage_grpo.tools.plan.times import (
    backward_time,
    clips_per_gpu_hour,
    forward_time,
    times,
    traffic,
    validation_time,
    volumes,
    waits,
)
from tests.tools.plan.imaginary import FREE_LINKS, MODEL, TRAINED, imaginary_plan

PASSES = 2 * 2 * 5  # micro-batches, guidance branches, denoising steps


def nvlink_rates(gather_seconds: float) -> Calibration:
    """Rates with which the weights of one pass arrive in this time."""
    return replace(FREE_LINKS, nvlink=traffic(imaginary_plan()).gather / gather_seconds)


def test_a_pass_is_its_parts():
    flops, r = MODEL.forward(18, 2), calibrate()
    attention = flops.attention / r.attention
    linear = flops.linear / r.linear
    token_blocks = 20 * 5
    forward = attention + linear + token_blocks * r.rest.eager
    compiled = attention + linear + token_blocks * r.rest.compiled
    assert forward_time(imaginary_plan()) == pytest.approx(2 * forward)  # two clips
    assert forward_time(imaginary_plan(sp_size=2)) == pytest.approx(forward)
    assert forward_time(imaginary_plan(compile=True)) == pytest.approx(2 * compiled)

    no_weights = 2.5 * flops.attention / r.attention_backward + token_blocks * r.rest_backward.eager
    plain = no_weights + 2 * linear
    expected = [
        ({}, plain + forward),
        ({"keep_attention": True}, plain + forward - attention),
        ({"checkpointing_fraction": 0.5}, plain + forward / 2),
        ({"enable_gradient_checkpointing": False}, plain),
        ({"use_lora": True}, no_weights + linear + forward),
    ]
    for flags, backward in expected:
        assert backward_time(imaginary_plan(**flags)) == pytest.approx(2 * backward), flags


def test_traffic():
    sharded = traffic(imaginary_plan(gpus=8))
    assert asdict(sharded) == pytest.approx(
        {"gather": 2 * 1600 * 7 / 8, "exchange": 0, "reduce": 4 * 1200 * 7 / 8, "replicas": 0}
    )
    mixed = traffic(imaginary_plan(gpus=8, dp_replicate=2, sp_size=4))
    assert mixed.replicas == pytest.approx(2 * 4 * 1200 / 4 / 2)
    assert mixed.exchange == pytest.approx(4 * (20 * 2 / 4) * 64 * 2 * 5 * 3 / 4)
    replicated = traffic(imaginary_plan(gpus=4, enable_fsdp=False, dtype="fp32"))
    assert replicated.gather == replicated.reduce == 0
    assert replicated.replicas == pytest.approx(2 * 4 * 1200 * 3 / 4)


def test_links():
    rates = replace(calibrate(), nvlink=300.0, nic=30.0)
    inside = waits(imaginary_plan(8, rates, sp_size=2))
    across = waits(imaginary_plan(16, rates, sp_size=2, dp_replicate=2))
    assert inside.gather == pytest.approx(2800 / 300)
    assert across.gather == pytest.approx(inside.gather)
    assert across.exchange == pytest.approx(inside.exchange)
    between = traffic(imaginary_plan(16, dp_replicate=2)).replicas
    assert across.replicas == pytest.approx(between / 30)
    ring = waits(imaginary_plan(16, rates))
    assert ring.gather == pytest.approx(2 * 1600 * 15 / 16 / (8 * 30))


def test_phases_without_any_wait():
    plan = imaginary_plan()
    forward, backward = forward_time(plan), backward_time(plan)
    seconds = times(plan)
    assert seconds == pytest.approx(
        {
            "rollout": PASSES * forward,
            "decode": 4 * 18 * FREE_LINKS.decode_tiled,
            "reward": 4 * FREE_LINKS.rewards["videoalign"].seconds,
            "anchor": 0.9 * PASSES * forward,
            "update": PASSES * (forward + backward),
        }
    )
    halved = times(imaginary_plan(sp_size=2))["decode"]
    assert halved == pytest.approx(2 * 18 * FREE_LINKS.decode_tiled)
    assert clips_per_gpu_hour(plan) == pytest.approx(3600 * 4 / sum(seconds.values()))


def test_only_the_clips_that_are_trained_cost_anything_after_the_reward():
    """Two of four: grpo also runs the old policy again, unless clips are sampled one by one."""
    plan = imaginary_plan()
    forward, backward = forward_time(plan), backward_time(plan)
    everything = times(plan)
    half = times(imaginary_plan(train_clips=2))
    for phase in ("rollout", "decode", "reward"):
        assert half[phase] == everything[phase]
    assert half["anchor"] == pytest.approx((1 + 0.9) * PASSES / 2 * forward)
    assert half["update"] == pytest.approx(PASSES / 2 * (forward + backward))

    alone = times(imaginary_plan(train_clips=2, micro_batch_size=1))
    assert alone["anchor"] == pytest.approx(0.9 * PASSES / 2 * forward)

    matched = {"algorithm": "nft", "timestep_fraction": 0.4}  # 2 of 5 levels without guidance
    for train_clips, micro_batches in ((None, 2), (2, 1)):
        seconds = times(imaginary_plan(train_clips=train_clips, **matched))
        assert seconds["rollout"] == pytest.approx(PASSES * forward)
        assert seconds["anchor"] == pytest.approx(2 * micro_batches * 2 * forward)
        assert seconds["update"] == pytest.approx(micro_batches * 2 * (forward + backward))

    # guidance in the two steps whose levels are 0.8 and more
    part = times(imaginary_plan(**matched, guidance_interval="0.9:1"))["rollout"]
    guided_steps = sum(level >= 0.9 for level in flow_sigmas(5, 5.0).tolist())
    assert 0 < guided_steps < 5
    assert part == pytest.approx(2 * (5 + guided_steps) * forward)

    # four clips in a forward of the rollout, two in one of the update
    whole = {"micro_batch_size": 4, "train_clips": 2}
    assert times(imaginary_plan(**whole))["update"] == pytest.approx(half["update"])


def test_passes_take_longer_in_the_trainer():
    forward, backward = forward_time(imaginary_plan()), backward_time(imaginary_plan())
    rates = replace(FREE_LINKS, trainer_overhead=Overhead(forward=1.1, backward=1.3))
    seconds = times(imaginary_plan(rates=rates))
    assert seconds["rollout"] == pytest.approx(PASSES * 1.1 * forward)
    assert seconds["anchor"] == pytest.approx(0.9 * PASSES * 1.1 * forward)
    assert seconds["update"] == pytest.approx(PASSES * (1.1 * forward + 1.3 * backward))


def test_a_gather_that_computation_hides_takes_no_time():
    forward = forward_time(imaginary_plan())
    seconds = times(imaginary_plan(rates=nvlink_rates(0.9 * forward)))
    assert seconds["rollout"] == pytest.approx(PASSES * forward)


def test_only_what_outlasts_the_computation_is_waited_for():
    forward, backward = forward_time(imaginary_plan()), backward_time(imaginary_plan())
    slow = nvlink_rates(3 * forward)
    assert times(imaginary_plan(rates=slow))["rollout"] == pytest.approx(PASSES * 3 * forward)
    gathered_once = times(imaginary_plan(rates=slow, gather_for_rollout=True))["rollout"]
    assert gathered_once == pytest.approx((PASSES - 2 + 2 * 3) * forward)

    wait = waits(imaginary_plan(rates=slow))
    gather = max(0, wait.gather - backward)
    reduction = max(0, wait.reduce - max(0, backward - wait.gather))
    assert reduction > 0
    update = times(imaginary_plan(rates=slow))["update"]
    assert update == pytest.approx(PASSES * (wait.gather + backward + gather + reduction))
    # Only the last backward reduces, once for each of its two branches.
    reduced_once = times(imaginary_plan(rates=slow, reduce_once=True))["update"]
    assert update - reduced_once == pytest.approx((PASSES - 2) * reduction)


def test_gradients_have_the_time_that_the_gather_leaves():
    forward, backward = forward_time(imaginary_plan()), backward_time(imaginary_plan())
    rates = nvlink_rates(backward / 2)
    assert waits(imaginary_plan(rates=rates)).reduce == pytest.approx(0.75 * backward)
    gather = max(0, backward / 2 - forward)
    update = times(imaginary_plan(rates=rates))["update"]
    assert update == pytest.approx(PASSES * (forward + gather + 1.25 * backward))


def test_nothing_overlaps_where_that_is_asked():
    slow = nvlink_rates(0.9 * forward_time(imaginary_plan()))
    wait = waits(imaginary_plan(rates=slow))
    free = times(imaginary_plan())
    serial = times(imaginary_plan(rates=slow), overlap=False)
    assert serial["rollout"] - free["rollout"] == pytest.approx(PASSES * wait.gather)
    expected = PASSES * (2 * wait.gather + wait.reduce)
    assert serial["update"] - free["update"] == pytest.approx(expected)


def test_exchanges_are_always_waited_for():
    free = times(imaginary_plan(sp_size=2))
    plan = imaginary_plan(rates=replace(FREE_LINKS, nvlink=1e9), sp_size=2)
    exchange = waits(plan).exchange
    assert times(plan)["rollout"] - free["rollout"] == pytest.approx(PASSES * exchange)
    more = times(plan)["update"] - free["update"]
    assert more == pytest.approx(PASSES * 3 * exchange, rel=0.05)


def test_an_offloaded_anchor_travels():
    slow = replace(FREE_LINKS, host=1e3)
    on_gpu = times(imaginary_plan(rates=slow))["anchor"]
    offloaded = times(imaginary_plan(rates=slow, reference_mode_offload=True))["anchor"]
    assert offloaded - on_gpu == pytest.approx(0.9 * 1200 / 4 * (4 + 4 + 2) / 1e3)


def test_volumes_of_an_iteration():
    once = traffic(imaginary_plan(sp_size=2))
    volume = volumes(imaginary_plan(sp_size=2))
    assert volume["weights"] == pytest.approx(once.gather * PASSES * (1 + 2.9))
    assert volume["gradients"] == pytest.approx(once.reduce * PASSES)
    assert volume["tokens"] == pytest.approx(once.exchange * PASSES * (1 + 3.9))
    # once per micro-batch of the rollout, once for the anchor, and twice per pass of the update
    gathered_once = volumes(imaginary_plan(gather_for_rollout=True))["weights"]
    assert gathered_once == pytest.approx(once.gather * (2 + 0.9 + PASSES * 2))


def test_transformers_that_take_turns_change_in_every_phase_that_runs_them():
    """The steps are at 1, 0.95, 0.88, 0.77 and 0.56, so one of the four windows of two steps crosses the boundary."""
    copy = 100.0  # seconds for all blocks: the computation hides next to nothing
    rates = replace(FREE_LINKS, host=5 * 240 * 2 / copy)
    two = replace(MODEL, experts=2, boundary=0.8)
    flags = {"use_lora": True, "enable_fsdp": False, "sde_window": "random_iteration:2"}
    flags |= {"validate_video_length": 9, "validation_fixed_size": "32x48"}
    flags |= {"validation_num_inference_steps": 5, "validation_timestep_shift": 5.0}
    config = imaginary_plan(**flags, master_weight_type="bf16").config
    plan = Plan(config, two, TRAINED, 4, text_tokens=2, rates=rates)
    assert plan.crossing == 1 / 4
    free = replace(plan, rates=FREE_LINKS)
    waits = {phase: seconds - times(free)[phase] for phase, seconds in times(plan).items()}
    in_windows = 2 / 4 * plan.trained_micro_batches * copy
    expected = {
        "rollout": 2 * plan.micro_batches * copy,
        "decode": 0.0,
        "reward": 0.0,
        "anchor": plan.anchor_fraction * in_windows,
        "update": in_windows,
    }
    assert waits == pytest.approx(expected, rel=1e-3, abs=1e-9)
    assert validation_time(plan, 4) - validation_time(free, 4) == pytest.approx(2 * copy, rel=1e-3)

    sharded = replace(config, enable_fsdp=True, enable_timestep_permutation=False)
    plan = Plan(sharded, two, TRAINED, 4, text_tokens=2, rates=rates)
    assert times(plan) == times(replace(plan, rates=FREE_LINKS))
