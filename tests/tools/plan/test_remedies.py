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
    assert [change.flag for change in changes] == ["--keep_attention False", "--sp_size 2"]
    assert [fits(change.plan, 80e9) for change in changes] == [False, True]


def test_one_remedy_is_enough_where_it_is():
    plan = full_size_plan(f"{LORA} --gather_for_rollout True")
    _, peak_bytes = peak(plan)
    (change,) = remedies(plan, peak_bytes + plan.rates.reserve - 1e9)
    assert change.flag == "--gather_for_rollout False"
    assert change.plan.config == replace(plan.config, gather_for_rollout=False)


def test_a_remedy_is_repeated_while_it_helps():
    """Nothing makes this run fit 10 GB: every remedy that saves memory is named, clips are halved again and again."""
    plan = full_size_plan(f"{LORA} --num_frames 81")
    changes = remedies(plan, 10e9)
    frames = [change.flag for change in changes if change.flag.startswith("--num_frames")]
    assert frames[:3] == ["--num_frames 41", "--num_frames 21", "--num_frames 9"]
    peaks = [peak(change.plan)[1] for change in changes]
    assert peaks == sorted(peaks, reverse=True) and not fits(changes[-1].plan, 10e9)


def test_a_run_that_fits_needs_none():
    assert remedies(full_size_plan(LORA), 200e9) == []
