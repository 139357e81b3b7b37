"""Work, traffic and times, counted by hand for a small imaginary model and simple rates."""

from dataclasses import replace

import pytest

from sage_grpo.config.fields import Config
from sage_grpo.models.cost import Architecture
from sage_grpo.tools.plan.model import (
    Calibration,
    Plan,
    Trained,
    compute_time,
    times,
    traffic,
    volumes,
    waits,
)
from sage_grpo.tools.templating import render

MODEL = Architecture(layers=5, heads=4, width=64, mlp_ratio=4, parameters=1600, block=240, vae=100)
TRAINED = Trained(total=1200, matrices=1000)
CONFIG = Config(
    enable_fsdp=True, batch_size=4, num_generations=4, num_sampling_steps=5, reward_model=("videoalign",), dtype="bf16",
    guidance_scale=6.0, timestep_shift=5.0, num_frames=9, height=32, width=48, micro_batch_size=2, report_to=("none",),
)  # fmt: skip
FREE = Calibration(nvlink=1e30, nic=1e30, host=1e30, optimizer=1e30, in_trainer=(1.0, 1.0))


def varied(**rates: float) -> Calibration:
    return Calibration(**vars(FREE) | rates)


def made(gpus: int = 4, rates: Calibration = FREE, **flags: object) -> Plan:
    return Plan(replace(CONFIG, **flags), MODEL, TRAINED, gpus, 2, rates)


def test_counts():
    plan = made(gpus=8, sp_size=2, sde_window="all_but_last", timestep_fraction=0.5, dp_replicate=2)
    assert (plan.latents, plan.tokens, plan.clips, plan.shards, plan.slices) == (18, 20, 16, 4, 2)
    assert (plan.branches, plan.trained_steps) == (2, 2)
    assert plan.rollout_passes == 2 * 2 * 5 and plan.training_passes == 2 * 2 * 2
    windows = made(
        sde_window="random:1", tail_steps=1, same_init_noise=True, gather_for_rollout=True
    )
    assert windows.ode_steps == (2, 4 / 5) and windows.rollout_passes == 2 * (
        2 / 2 + 2 * (1 + 4 / 5)
    )
    assert made(guidance_scale=1.0).branches == 1 and made(micro_batch_size=None).micro_batch == 4


def test_rates_of_another_card_are_scaled_by_what_bounds_them():
    measured, other = Calibration(), Calibration("a100")
    assert Calibration("h200") == measured and other.card == "a100"
    assert (
        other.linear / measured.linear
        == other.attention / measured.attention
        == pytest.approx(312 / 989)
    )
    assert (
        other.decode / measured.decode
        == other.rest[1] / measured.rest[1]
        == pytest.approx(4.8 / 2.04)
    )
    assert other.nvlink == pytest.approx(measured.nvlink * 300 / 450)
    assert (
        Calibration("h100").linear == measured.linear
        and Calibration("h100").decode > measured.decode
    )


def test_share_of_iterations_with_an_anchor():
    assert made(update_ref_model_step=10).anchored == pytest.approx(0.9)
    assert made(update_ref_model_step=5, updates_per_rollout=2).anchored == pytest.approx(2 / 3)
    assert made(update_ref_model_step=1).anchored == 0
    assert made(use_moving_KL=False).anchored == 1
    assert made(kl_weight=0.0, use_dual_kl=False).anchored == 0


def test_a_policy_that_lags_is_no_anchor():
    assert made(algorithm="nft").anchored == 1.0 and made(
        algorithm="awm"
    ).anchored == pytest.approx(0.9)
    for without in ({"nft_decay": 0.0}, {"nft_decay_growth": 0.0}):
        assert made(algorithm="nft", **without).anchored == pytest.approx(0.9)


def test_clips_without_an_sde_take_no_more_steps_than_there_are():
    few, many = (made(algorithm="awm", tail_steps=steps, num_sampling_steps=4) for steps in (3, 10))
    rest = few.slices * few.trained_steps
    assert (few.rollout_passes - rest, many.rollout_passes - rest) == (
        few.slices * 2 * 3,
        few.slices * 2 * 4,
    )


def test_a_layout_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="sp_size is 3; it must divide the model's 4 heads"):
        made(gpus=3, sp_size=3)
    with pytest.raises(
        ValueError, match="sp_size is 3; it must divide the number of processes, which is 4"
    ):
        made(gpus=4, sp_size=3)
    with pytest.raises(ValueError, match="dp_replicate is 3"):
        made(gpus=4, dp_replicate=3)


def test_a_pass_is_its_parts():
    work, r, rest = MODEL.forward(18, 2), Calibration(), 20 * 5
    attention, linear = work.attention / r.attention, work.linear / r.linear
    forward = attention + linear + rest * r.rest[1]
    assert compute_time(made()) == pytest.approx(2 * forward)  # two clips
    assert compute_time(made(sp_size=2)) == pytest.approx(forward)
    assert compute_time(made(compile=True)) == pytest.approx(
        2 * (attention + linear + rest * r.rest[0])
    )
    own = 2.5 * work.attention / r.attention_backward + rest * r.rest_backward[1]
    backward = {
        "recomputed": (made(), own + 2 * linear + forward),
        "attention kept": (made(keep_attention=True), own + 2 * linear + forward - attention),
        "half": (made(checkpointing_fraction=0.5), own + 2 * linear + forward / 2),
        "none": (made(enable_gradient_checkpointing=False), own + 2 * linear),
        "adapter": (made(use_lora=True), own + linear + forward),
    }
    for plan, expected in backward.values():
        assert compute_time(plan, backward=True) == pytest.approx(2 * expected)


def test_traffic():
    plain = {"gather": 2 * 1600 * 7 / 8, "exchange": 0, "reduce": 4 * 1200 * 7 / 8, "replicas": 0}
    assert traffic(made(gpus=8)) == pytest.approx(plain)
    both = traffic(made(gpus=8, dp_replicate=2, sp_size=4))
    assert both["replicas"] == pytest.approx(2 * 4 * 1200 / 4 / 2)
    assert both["exchange"] == pytest.approx(4 * (20 * 2 / 4) * 64 * 2 * 5 * 3 / 4)
    alone = traffic(made(gpus=4, enable_fsdp=False, dtype="fp32"))
    assert alone["gather"] == alone["reduce"] == 0 and alone["replicas"] == pytest.approx(
        2 * 4 * 1200 * 3 / 4
    )


def test_links():
    rates = Calibration(nvlink=300.0, nic=30.0)
    inside, across = (
        waits(made(8, rates, sp_size=2)),
        waits(made(16, rates, sp_size=2, dp_replicate=2)),
    )
    assert inside["gather"] == pytest.approx(2800 / 300) == pytest.approx(across["gather"])
    assert across["exchange"] == pytest.approx(inside["exchange"])
    assert across["replicas"] == pytest.approx(traffic(made(16, dp_replicate=2))["replicas"] / 30)
    assert waits(made(16, rates))["gather"] == pytest.approx(2 * 1600 * 15 / 16 / (8 * 30))


def test_phases_without_any_wait():
    forward, backward, plan = compute_time(made()), compute_time(made(), backward=True), made()
    found = times(plan)
    assert found["rollout"] == pytest.approx(2 * 2 * 5 * forward)
    assert found["anchor"] == pytest.approx(0.9 * 2 * 2 * 5 * forward)
    assert found["update"] == pytest.approx(2 * 2 * 5 * (forward + backward))
    assert found["decode"] == pytest.approx(4 * 18 * FREE.decode)
    assert found["reward"] == pytest.approx(4 * FREE.rewards["videoalign"][2])
    assert times(made(sp_size=2))["decode"] == pytest.approx(2 * 18 * FREE.decode)
    assert plan.clips_per_gpu_hour == pytest.approx(3600 * 4 / sum(found.values()))


def test_passes_take_longer_in_the_trainer():
    forward, backward = compute_time(made()), compute_time(made(), backward=True)
    found = times(made(rates=varied(in_trainer=(1.1, 1.3))))
    assert found["rollout"] == pytest.approx(20 * 1.1 * forward)
    assert found["anchor"] == pytest.approx(0.9 * 20 * 1.1 * forward)
    assert found["update"] == pytest.approx(20 * (1.1 * forward + 1.3 * backward))


def test_only_what_outlasts_the_computation_is_waited_for():
    forward, backward = compute_time(made()), compute_time(made(), backward=True)
    fast = varied(nvlink=traffic(made())["gather"] / (0.9 * forward))
    assert times(made(rates=fast))["rollout"] == pytest.approx(20 * forward)
    slow = varied(nvlink=traffic(made())["gather"] / (3 * forward))
    assert times(made(rates=slow))["rollout"] == pytest.approx(20 * 3 * forward)
    assert times(made(rates=slow, gather_for_rollout=True))["rollout"] == pytest.approx(
        (18 + 2 * 3) * forward
    )
    seconds = waits(made(rates=slow))
    gather = max(0, seconds["gather"] - backward)
    reduction = max(0, seconds["reduce"] - max(0, backward - seconds["gather"]))
    assert reduction > 0
    expected = 20 * (seconds["gather"] + backward + gather + reduction)
    assert times(made(rates=slow))["update"] == pytest.approx(expected)
    once = times(made(rates=slow, reduce_once=True))[
        "update"
    ]  # in the last backward, which has two branches
    assert expected - once == pytest.approx(18 * reduction)


def test_gradients_have_the_time_that_the_gather_leaves():
    forward, backward = compute_time(made()), compute_time(made(), backward=True)
    half = varied(nvlink=traffic(made())["gather"] / (backward / 2))
    assert waits(made(rates=half))["reduce"] == pytest.approx(0.75 * backward)
    gather = max(0, backward / 2 - forward)
    assert times(made(rates=half))["update"] == pytest.approx(
        20 * (forward + gather + 1.25 * backward)
    )


def test_nothing_overlaps_where_that_is_asked():
    slow = varied(nvlink=traffic(made())["gather"] / (0.9 * compute_time(made())))
    plan, wait = made(rates=slow), waits(made(rates=slow))
    found, free = times(plan, overlap=False), times(made())
    assert found["rollout"] - free["rollout"] == pytest.approx(20 * wait["gather"])
    assert found["update"] - free["update"] == pytest.approx(
        20 * (2 * wait["gather"] + wait["reduce"])
    )


def test_exchanges_are_always_waited_for():
    plan = made(rates=varied(nvlink=1e9), sp_size=2, enable_fsdp=True)
    free, wait = made(sp_size=2), waits(plan)["exchange"]
    assert times(plan)["rollout"] - times(free)["rollout"] == pytest.approx(20 * wait)
    assert times(plan)["update"] - times(free)["update"] == pytest.approx(20 * 3 * wait, rel=0.05)


def test_an_offloaded_anchor_travels():
    slow = varied(host=1e3)
    more = (
        times(made(rates=slow, reference_mode_offload=True))["anchor"]
        - times(made(rates=slow))["anchor"]
    )
    assert more == pytest.approx(0.9 * 1200 / 4 * (4 + 4 + 2) / 1e3)


def test_volumes_of_an_iteration():
    one, found = traffic(made(sp_size=2)), volumes(made(sp_size=2))
    assert found["weights"] == pytest.approx(one["gather"] * (20 + 20 * 2.9))
    assert found["gradients"] == pytest.approx(one["reduce"] * 20)
    assert found["tokens"] == pytest.approx(one["exchange"] * (20 + 20 * 3.9))
    assert volumes(made(gather_for_rollout=True))["weights"] == pytest.approx(
        one["gather"] * (2 + 20 * 2.9)
    )


def test_few_prompts_per_update_are_named():
    enough, few = (render("few_prompts.txt", prompts=count).strip() for count in (8, 7))
    assert (
        not enough
        and few.startswith("7 prompt(s) per update: below 8")
        and few.endswith("accumulation_steps")
    )
