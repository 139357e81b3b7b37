"""What makes a run fit: as few changes as possible, the cheapest first."""

from dataclasses import replace

from sage_grpo.tools.plan.memory import fits, peak
from sage_grpo.tools.plan.remedies import remedies
from tests.tools.plan.full_size import LORA, full_size_plan


def test_several_remedies_add_up():
    plan = full_size_plan(
        "--pretrained_transformer_version 720p_t2v --num_frames 121 --batch_size 4 "
        "--keep_attention True --enable_fsdp True --micro_batch_size 1",
        gpus=8,
    )
    changes = remedies(plan, 80e9)
    assert [change.words for change in changes] == ["--keep_attention False", "--sp_size 2"]
    assert [fits(change.plan, 80e9) for change in changes] == [False, True]


def test_one_remedy_is_enough_where_it_is():
    plan = full_size_plan(f"{LORA} --gather_for_rollout True")
    _, peak_bytes = peak(plan)
    (change,) = remedies(plan, peak_bytes + plan.rates.reserve - 1e9)
    assert change.words == "--gather_for_rollout False"
    assert change.plan.config == replace(plan.config, gather_for_rollout=False)


WAN = LORA + " --pretrained_transformer_version wan21-1.3b"


def test_remedies_are_combined_and_repeated_until_the_run_fits():
    plan = full_size_plan(f"{WAN} --reward_model shapes --num_frames 241")
    changes = remedies(plan, 14e9)
    frames = [change.flags["num_frames"] for change in changes if "num_frames" in change.flags]
    assert frames == [121, 61, 29][: len(frames)] and len(frames) > 1
    assert [fits(change.plan, 14e9) for change in changes] == [False] * (len(changes) - 1) + [True]
    peaks = [peak(change.plan)[1] for change in changes]
    assert peaks == sorted(peaks, reverse=True)


def test_more_gpus_are_offered_where_flags_are_not_enough():
    plan = full_size_plan(f"{LORA} --reward_model shapes")
    gpu_bytes = 20e9  # the weights alone take 16.9 GB, beside a reserve of 4 GB
    first, *others = remedies(plan, gpu_bytes)
    assert first.flags == {"gpus": 2, "enable_fsdp": True} and first.plan.gpus == 2
    assert fits([first, *others][-1].plan, gpu_bytes)


def test_nothing_is_offered_where_nothing_helps():
    plan = full_size_plan(f"{LORA} --reward_model shapes")
    assert remedies(plan, 5e9) == []


def test_weights_that_stay_sharded_need_one_window():
    plan = full_size_plan(f"{LORA} --gather_for_rollout True --sde_window random:2")
    _, peak_bytes = peak(plan)
    (change,) = remedies(plan, peak_bytes + plan.rates.reserve - 1e9)
    assert change.words == "--gather_for_rollout False --sde_window random_iteration:2"


def test_a_run_that_fits_needs_none():
    assert remedies(full_size_plan(LORA), 200e9) == []
