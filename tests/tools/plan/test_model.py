"""What a plan counts, by hand for a small imaginary model."""

import itertools

import pytest

from tests.tools.plan.imaginary import imaginary_plan


def test_layout_and_micro_batches():
    plan = imaginary_plan(gpus=8, sp_size=2, dp_replicate=2)
    assert (plan.latent_positions, plan.tokens) == (18, 20)
    assert (plan.clips, plan.shards, plan.micro_batches) == (16, 4, 2)
    assert imaginary_plan(micro_batch_size=None).micro_batch_size == 4


def test_passes_of_an_iteration():
    plan = imaginary_plan(
        gpus=8, sp_size=2, sde_window="all_but_last", timestep_fraction=0.5, dp_replicate=2
    )
    assert (plan.branches, plan.trained_steps) == (2, 2)
    assert plan.rollout_passes == 2 * 2 * 5
    assert plan.training_passes == 2 * 2 * 2
    assert imaginary_plan(guidance_scale=1.0).branches == 1


WINDOWS = {
    "sde_window": "random:1",
    "tail_steps": 1,
    "same_init_noise": True,
    "gather_for_rollout": True,
}


def test_a_group_shares_the_steps_before_its_window():
    """Windows start at one of five steps; the first four leave a tail of one step."""
    plan = imaginary_plan(gpus=1, **WINDOWS)
    assert plan.rollout_passes == pytest.approx(2 * (2 / 2 + 2 * (1 + 4 / 5)))


def test_ranks_wait_for_the_costliest_window():
    """Two micro-batches of two clips on each of two ranks, all pairs of windows equally likely."""
    plan = imaginary_plan(gpus=2, **WINDOWS)
    first_batch = [start / 2 + 1 + int(start < 4) for start in range(5)]
    second_batch = [1 + int(start < 4) for start in range(5)]
    pairs = list(itertools.product(range(5), repeat=2))
    longest = [
        max(first_batch[a], first_batch[b]) + max(second_batch[a], second_batch[b])
        for a, b in pairs
    ]
    assert plan.rollout_passes == pytest.approx(2 * sum(longest) / len(pairs))
    assert plan.own_rollout_passes == imaginary_plan(gpus=1, **WINDOWS).rollout_passes

    shared = imaginary_plan(gpus=2, **WINDOWS | {"sde_window": "random_iteration:1"})
    assert shared.rollout_passes == shared.own_rollout_passes == plan.own_rollout_passes


@pytest.mark.parametrize(
    ("gpus", "flags", "windows"),
    [
        (8, {}, 8),
        (8, {"sp_size": 2}, 4),
        (8, {"batch_size": 2}, 4),  # two ranks share a group
        (8, {"batch_size": 8}, 8),
        (8, {"sde_window": "slide:1"}, 8),
        (8, {"sde_window": "slide_iteration:1"}, 1),
    ],
)
def test_how_many_windows_run_at_once(gpus, flags, windows):
    assert imaginary_plan(gpus=gpus, **WINDOWS | flags).windows_at_once == windows


def test_fraction_of_iterations_with_an_anchor():
    assert imaginary_plan(update_ref_model_step=10).anchor_fraction == pytest.approx(0.9)
    two_updates = imaginary_plan(update_ref_model_step=5, updates_per_rollout=2)
    assert two_updates.anchor_fraction == pytest.approx(2 / 3)
    assert imaginary_plan(update_ref_model_step=1).anchor_fraction == 0
    assert imaginary_plan(use_moving_KL=False).anchor_fraction == 1
    assert imaginary_plan(kl_weight=0.0, use_dual_kl=False).anchor_fraction == 0


def test_a_policy_that_lags_is_not_its_own_anchor():
    assert imaginary_plan(algorithm="awm").anchor_fraction == pytest.approx(0.9)
    assert imaginary_plan(algorithm="nft").anchor_fraction == 1.0
    for without_lag in ({"nft_decay": 0.0}, {"nft_decay_growth": 0.0}):
        plan = imaginary_plan(algorithm="nft", **without_lag)
        assert plan.anchor_fraction == pytest.approx(0.9)


def test_clips_without_an_sde_take_no_more_steps_than_there_are():
    few = imaginary_plan(algorithm="awm", tail_steps=3, num_sampling_steps=4)
    many = imaginary_plan(algorithm="awm", tail_steps=10, num_sampling_steps=4)
    assert few.rollout_passes == few.micro_batches * 2 * 3
    assert many.rollout_passes == many.micro_batches * 2 * 4
    assert few.old_policy_passes == few.micro_batches * few.trained_steps


@pytest.mark.parametrize(
    ("gpus", "flags", "words"),
    [
        (3, {"sp_size": 3}, "sp_size is 3; it must divide the model's 4 heads"),
        (4, {"sp_size": 3}, "sp_size is 3; it must divide the number of processes, which is 4"),
        (4, {"dp_replicate": 3}, "dp_replicate is 3"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(gpus, flags, words):
    with pytest.raises(ValueError, match=words):
        imaginary_plan(gpus=gpus, **flags)
