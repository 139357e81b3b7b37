"""Bytes of each part, counted by hand for a small imaginary model."""

from dataclasses import replace

import pytest

from sage_grpo.config import Config
from sage_grpo.models.cost import Architecture
from sage_grpo.tools.plan_memory import MOMENTS, activations, fits, gathered, gradients, memory, peak
from sage_grpo.tools.plan_model import Calibration, Plan, Trained

MODEL = Architecture(layers=5, heads=4, width=64, mlp_ratio=4, parameters=1600, block=240, vae=100)
TRAINED = Trained(total=1200, matrices=1000)
FULL = Config(
    enable_fsdp=True, batch_size=2, num_generations=2, num_sampling_steps=3, reward_model=("videoalign",), dtype="bf16",
    guidance_scale=6.0, timestep_shift=5.0, num_frames=9, height=32, width=48, ema_decay=0.9, report_to=("none",),
    reduce_once=False, micro_batch_size=1,
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
    assert part("weights", dp_replicate=2) == [4 * 1600 / 2] * 6
    assert part("optimizer") == [2 * 4 * 300] * 5 + [3 * 4 * 300]
    assert part("optimizer", optimizer="muon") == [4 * (250 + 2 * 50)] * 5 + [4 * (250 + 3 * 50)]


def test_adapters_beside_a_bf16_model():
    assert part("weights", LORA) == [2 * 1600 / 4 + 4 * 300] * 6
    assert part("anchor", LORA) == [4 * 300] * 6 == part("anchor", LORA, reference_mode_offload=True)


def test_anchor_is_bf16_and_keeps_the_policy_meanwhile():
    assert part("anchor") == [600, 600, 600, 600 + 1200, 600, 600]
    assert part("anchor", reference_mode_offload=True) == part("anchor", kl_weight=0.0, use_dual_kl=False) == [0] * 6


def test_gathered_weights():
    few = 2 * (1600 - 3 * 240)  # two blocks, and what is in none
    assert list(gathered(made()).values()) == [few, 0, 0, few, few, 0]
    assert list(gathered(made(gather_for_rollout=True)).values()) == [2 * 1600, 0, 0, few, few, 0]
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
    tokens, rates = 3 * 2 * 3 + 2, Calibration()
    unit, inner = tokens * 64 * 2, rates.inner_training[1]
    assert made().tokens == tokens
    assert activations(made())["update"] == pytest.approx(2 * 5 * unit + inner * unit)  # two branches, five blocks
    assert activations(made(guidance_scale=1.0))["update"] == pytest.approx(5 * unit + inner * unit)
    kept = 2 * 5 * (2 * unit + tokens * 4 * 4)
    assert activations(made(keep_attention=True))["update"] == pytest.approx(kept + inner * unit)
    saved = 2 * 5 * unit * (0.5 + 0.5 * rates.saved)
    assert activations(made(checkpointing_fraction=0.5))["update"] == pytest.approx(saved + inner * unit)
    assert activations(made())["rollout"] == pytest.approx(rates.inner_forward[1] * unit)
    assert activations(made(compile=True))["rollout"] == pytest.approx(rates.inner_forward[0] * unit)
    halved = activations(made(sp_size=2))["update"]
    assert halved == pytest.approx((2 * 5 + inner + rates.exchange) * unit / 2)


def test_trajectories_and_the_small_models():
    states = 4 + 3 + 3  # states, velocities of policy and anchor
    assert part("trajectories") == [states * 18 * 32 * 4 * 2] * 6
    assert part("trajectories", kl_weight=0.0, use_dual_kl=False) == [(4 + 3) * 18 * 32 * 4 * 2] * 6
    rates = Calibration()
    assert part("VAE") == [200, 200 + rates.decode_bytes / 9, 200, 200, 200, 200]
    size, inside, _ = rates.rewards["videoalign"]
    assert part("reward") == [size, size, size + inside, size, size, size]
    assert part("reward", reward_model=("shapes",)) == [0] * 6


def test_peak_is_the_fullest_moment_and_needs_a_reserve():
    plan = made()
    totals = {moment: sum(row[moment] for row in memory(plan).values()) for moment in MOMENTS}
    assert peak(plan) == ("reward", totals["reward"]) and totals["reward"] == max(totals.values())
    reserve = plan.rates.reserve
    assert fits(plan, totals["reward"] + reserve) and not fits(plan, totals["reward"] + reserve - 1)
