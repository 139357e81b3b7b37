"""Which clips are sampled, with which noise, and which steps are trained."""

import json
from types import SimpleNamespace

import pytest
import torch

from sage_grpo.tools.plan.memory import memory
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.train.batches import draw_prompts, join_micro_batches, plan_micro_batches
from sage_grpo.train.rollout import at_positions
from tests.smallest_run import on_tiny


def test_every_epoch_has_each_prompt_once_in_a_fresh_order():
    drawn = [p for step in range(9) for p in draw_prompts(step, 4, 6, seed=3)]
    epochs = [drawn[start : start + 6] for start in range(0, 36, 6)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert drawn[:4] == draw_prompts(0, 4, 6, seed=3) != draw_prompts(0, 4, 6, seed=4)


def test_ranks_share_the_rows_of_the_whole_batch():
    whole = plan_micro_batches([7, 2, 9], 4, 12, 0, None)
    assert whole == [tuple((prompt, sample) for sample in range(4)) for prompt in (7, 2, 9)]
    for batch, ranks in ((4, 3), (2, 6), (1, 12)):
        parts = [
            one
            for rank in range(ranks)
            for one in plan_micro_batches([7, 2, 9], 4, batch, rank, None)
        ]
        assert [clip for one in parts for clip in one] == [clip for one in whole for clip in one]
    assert [len(one) for one in plan_micro_batches([7, 2], 4, 8, 0, 2)] == [2, 2, 2, 2]


def test_a_prompt_that_comes_twice_never_repeats_its_noise():
    micro_batches = plan_micro_batches([5, 5], 2, 4, 0, None)
    assert micro_batches == [((5, 0), (5, 1)), ((5, 2), (5, 3))]


def test_orders_are_permutations_of_the_window(make):
    def order(step=0, **flags):
        trainer = make(
            num_sampling_steps=4, batch_size=4, num_generations=4, overwrite=True, **flags
        )
        trainer.state.step = step
        return trainer.roll_out()[0].trained_positions.tolist()

    found = order()
    assert (
        all(sorted(row) == [0, 1, 2, 3] for row in found) and len({tuple(row) for row in found}) > 1
    )
    assert order(timestep_fraction=0.5, enable_timestep_permutation=False) == [[0, 1]] * 4
    assert [len(order(timestep_fraction=share)[0]) for share in (0.01, 0.7)] == [
        1,
        3,
    ]  # 0.04 and 2.8 steps
    assert found != order(step=1)


def test_at_steps_takes_each_row_at_its_own_step():
    values = torch.arange(24).view(3, 4, 2)
    assert at_positions(values, torch.tensor([3, 0, 1])).tolist() == [[6, 7], [8, 9], [18, 19]]


def test_rollouts_do_not_depend_on_the_split(make):
    """Noise belongs to the clip, so one micro-batch gives the clips of several."""
    paths = []
    for size in (2, 1):
        trainer = make(micro_batch_size=size, overwrite=True)
        paths.append(torch.cat([t.data.x for t in trainer.roll_out()]))
    torch.testing.assert_close(paths[0], paths[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(paths[0][:, 0], paths[1][:, 0])


@on_tiny
@pytest.mark.parametrize(
    "changes", [{"sde_window": "all"}, {"algorithm": "awm", "timestep_fraction": 0.5}]
)
def test_a_trajectory_keeps_what_the_planner_counts(make, changes):
    trainer = make(**changes, num_sampling_steps=4, kl_weight=0.0, use_dual_kl=False)
    batch = trainer.prepare_for_training(trainer.roll_out())
    parts = [
        part for t in batch for part in (t.data.x, t.data.outcome, t.data.velocity, t.data.latents)
    ]
    kept = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    planned = memory(plan_of(trainer.config, 1))["trajectories"]
    assert sum(kept.values()) == planned["update"]


def test_prompts_of_equal_length_share_a_forward():
    ones = plan_micro_batches([7, 2, 9, 4, 2], 2, 10, 0, None)
    lengths = {7: "short", 2: "long", 9: "short", 4: "short"}
    conditions = {prompt: SimpleNamespace(shapes=length) for prompt, length in lengths.items()}
    assert join_micro_batches(ones, conditions, prompts_per_forward=2) == [
        ((7, 0), (7, 1), (9, 0), (9, 1)),
        ((4, 0), (4, 1)),
        ((2, 0), (2, 1), (2, 2), (2, 3)),
    ]
    assert join_micro_batches(ones, conditions, prompts_per_forward=1) == ones


@on_tiny
def test_joined_prompts_are_trained_as_each_alone(make, tmp_path):
    """Two of the three texts are equally long; the clips, the gradient and the metrics stay what they were."""
    (tmp_path / "three.txt").write_text(
        "a red circle moving left\na red moving left\na green square moving right\n"
    )
    flags = {
        "batch_size": 6,
        "num_generations": 2,
        "max_steps": 1,
        "guidance_scale": 3.0,
        "overwrite": True,
    }
    sizes, clips, lines = [], [], []
    for together in (1, 3):
        trainer = make(
            prompts_per_forward=together, train_prompts=str(tmp_path / "three.txt"), **flags
        )
        trainer.validation, batch = None, trainer.roll_out()
        sizes.append([len(one.data.x) for one in batch])
        rows = sorted(range(6), key=lambda i: (trainer.requests_of(batch)[i].text, i))
        clips.append(torch.cat([one.data.x for one in batch])[rows])
        trainer.train()
        lines.append(json.loads((trainer.run.path / "metrics.jsonl").read_text().splitlines()[-1]))
    assert sizes[0] == [2, 2, 2] and sorted(sizes[1]) == [2, 4]
    assert torch.equal(clips[0][:, 0], clips[1][:, 0])
    torch.testing.assert_close(*clips, rtol=1e-4, atol=1e-4)
    assert lines[1]["policy/ratio_max_deviation"] == 0
    for name in ("reward/total", "policy/grad_norm", "reward/group_std"):
        assert lines[0][name] == pytest.approx(lines[1][name], rel=1e-2), name  # pixels are rounded


def test_same_init_noise_is_shared_by_the_group_alone(make, tmp_path):
    (tmp_path / "one.txt").write_text(
        "a red circle moving left\n"
    )  # both groups are of the same prompt
    trainer = make(same_init_noise=True, train_prompts=str(tmp_path / "one.txt"))
    first, second = trainer.roll_out()
    assert torch.equal(first.data.x[0, 0], first.data.x[1, 0]) and not torch.equal(
        first.data.x[0, 0], second.data.x[0, 0]
    )
    assert not torch.equal(first.data.x[0, 1], first.data.x[1, 1])


def test_each_iteration_has_fresh_noise(make):
    trainer = make()
    first = trainer.roll_out()[0].data.x[:, 0]
    trainer.state.step = 3  # one epoch of three prompts later, two prompts per iteration: the same prompts come again
    assert not any(torch.equal(first, t.data.x[:, 0]) for t in trainer.roll_out())
