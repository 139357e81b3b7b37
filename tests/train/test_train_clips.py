"""train_clips: only the best and the worst clips of each group are trained, and nothing else costs anything."""

import pytest
import torch

from sage_grpo.algo.grpo import group_advantages
from sage_grpo.config.parse import from_values
from sage_grpo.parallel.fsdp import full_tensor
from sage_grpo.train import build
from sage_grpo.train.batches import ClipId, join_micro_batches, split_clips
from tests.dist import run_ranks
from tests.smallest_run import slow
from tests.train.iterations import in_fp64

ALGORITHMS = {
    "grpo": {"sde_window": "random:2", "same_init_noise": True, "tail_steps": 1},
    "awm": {"algorithm": "awm", "timestep_fraction": 0.7},
    "nft": {"algorithm": "nft", "nft_beta": 0.5, "nft_decay_growth": 0.2, "timestep_fraction": 0.7},
}
# two groups of four; the extremes of the first are its first two clips, those of the second its outer ones
REWARDS = torch.tensor([5.0, -5.0, 0.1, 0.2, 3.0, 1.0, 1.5, -2.0], dtype=torch.float64)
EXTREMES = [0, 1, 4, 7]
GROUPS = {"batch_size": 8, "num_generations": 4, "num_sampling_steps": 4}


def known_advantages(trainer):
    return group_advantages(REWARDS, torch.arange(8) // trainer.config.num_generations)


def gradients(trainer, advantages):
    """The gradient of one iteration before the optimizer, over all ranks, with all clips or the selected ones."""
    trainer.ratio_checked = False
    found = {}

    def optimizer_step():
        parameters = trainer.optimization.parameters
        trainer.ranks.sum_gradients(parameters.values())
        found.update({name: full_tensor(p.grad).clone() for name, p in parameters.items()})
        trainer.optimization.zero_grad()
        return 1.0

    trainer.optimizer_step = optimizer_step
    batch, trained = trainer.select(trainer.roll_out(), advantages)
    trainer.prepare_anchor(batch)
    trainer.update(batch, trained)
    return found, batch


@pytest.mark.parametrize("micro_batch_size", [None, 2, 1])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_are_those_of_the_extremes_alone(make, name, micro_batch_size):
    """As if all were trained and the others had no advantage; the mean is over half as many clips."""
    flags = GROUPS | ALGORITHMS[name] | {"micro_batch_size": micro_batch_size, "kl_weight": 0.0}
    trainer = make(**flags, train_clips=2, center_trained=False)
    found, batch = gradients(trainer, known_advantages(trainer))
    chosen = [clip for trajectory in batch for clip in trajectory.micro_batch]
    everyone = [clip for clips in trainer.micro_batches() for clip in clips]
    assert chosen == [everyone[row] for row in EXTREMES]

    everything = make(**flags, overwrite=True)
    advantages = known_advantages(everything)
    others = [row for row in range(8) if row not in EXTREMES]
    advantages.values[others] = 0.0
    wanted, _ = gradients(everything, advantages)
    assert max(value.abs().max() for value in wanted.values()) > 1e-6
    for parameter, value in wanted.items():
        torch.testing.assert_close(found[parameter], 2 * value, rtol=2e-3, atol=1e-6)


def test_centered_advantages_pull_equally_to_both_sides(make):
    trainer = make(**GROUPS, **ALGORITHMS["nft"], train_clips=2)
    advantages = known_advantages(trainer)
    chosen = advantages.values[EXTREMES].view(2, 2)
    _, trained = trainer.select(trainer.roll_out(), advantages)
    half = (chosen[:, 0] - chosen[:, 1]) / 2
    torch.testing.assert_close(trained.values.view(2, 2), torch.stack([half, -half], 1))

    everything = make(**GROUPS, **ALGORITHMS["nft"], overwrite=True)
    advantages = known_advantages(everything)
    advantages.values[0] += 1.0  # a full group is left as it is
    _, trained = everything.select(everything.roll_out(), advantages)
    assert torch.equal(trained.values, advantages.values)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_others_cost_nothing_after_the_reward(make, name):
    """Clips that pass through the model in the rollout, and after the reward."""
    counts = {}
    for train_clips in (None, 2):
        trainer = make(**GROUPS, **ALGORITHMS[name], train_clips=train_clips, overwrite=True)
        trainer.anchor.age += 1  # it differs from the policy
        passed = []
        trainer.backbone.transformer.register_forward_pre_hook(
            lambda _, inputs, passed=passed: passed.append(len(inputs[0]))
        )
        batch = trainer.roll_out()
        in_rollout = sum(passed)
        batch, trained = trainer.select(batch, known_advantages(trainer))
        trainer.prepare_anchor(batch)
        before_update = sum(passed)
        trainer.update(batch, trained)
        counts[train_clips] = (
            in_rollout,
            before_update - in_rollout,
            sum(passed) - before_update,
        )
    everything, half = counts[None], counts[2]
    levels = 2 if name == "grpo" else 3
    assert half[0] == everything[0]
    # the anchor, and the old policy at the noised states; grpo computes it again for clips in other company
    assert half[1] == 4 * levels * 2
    assert everything[1] == 8 * levels * (1 if name == "grpo" else 2)
    assert (half[2], everything[2]) == (4 * levels, 8 * levels)


@pytest.mark.parametrize(
    "changes", [{}, slow({"prompts_per_forward": 2}), slow({"micro_batch_size": 2})]
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_runs_have_an_exact_first_ratio_and_resume_to_the_bit(make, tmp_path, name, changes):
    """With accumulation: a stop between two rollouts of one optimizer step repeats the first."""
    flags = GROUPS | ALGORITHMS[name] | changes
    flags |= {"train_clips": 2, "gradient_accumulation_steps": 2, "save_interval": 2}
    whole = make(**flags, max_steps=4, output_dir=str(tmp_path / "whole"))
    before = {n: p.detach().clone() for n, p in whole.optimization.parameters.items()}
    whole.train()  # stops if the first ratio is not exactly 1
    assert whole.ratio_checked
    assert any(not torch.equal(p, before[n]) for n, p in whole.optimization.parameters.items())

    parts = {"output_dir": str(tmp_path / "parts")}
    make(**flags, **parts, max_steps=2).train()
    rest = make(**flags, **parts, max_steps=4, resume_from_checkpoint="auto")
    assert rest.step == 2
    rest.train()
    for n, p in whole.optimization.parameters.items():
        assert torch.equal(p, rest.optimization.parameters[n]), n


def rank_gradients(ranks, values):
    """In fp64: gradients of all ranks together, and the clips that this rank trains."""
    in_fp64()
    clips_here = {"batch_size": 8 // ranks.dp_size}
    trainer = build.load_trainer(from_values(values | clips_here), ranks)
    trainer.anchor.age += 1
    found, batch = gradients(trainer, known_advantages(trainer))
    return found, [tuple(clip) for trajectory in batch for clip in trajectory.micro_batch]


@pytest.mark.parametrize("group_size, sharded", [(8, False), slow(4, False), slow(8, True)])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_train_what_one_process_trains(flags, name, group_size, sharded):
    """Two ranks share a group of eight, whose extremes are both on the first: one moves.

    Slow: a group each, and shards of one model, whose ranks wait for each other in every forward.
    """
    values = flags | GROUPS | ALGORITHMS[name] | {"train_clips": 2, "overwrite": True}
    values |= {"num_generations": group_size}
    ((wanted, clips),) = run_ranks(1, rank_gradients, values)
    values |= {"enable_fsdp": sharded, "gather_for_rollout": sharded}
    found = run_ranks(2, rank_gradients, values, sharded=sharded)
    per_rank = len(clips) // 2
    for rank, (rank_found, rank_clips) in enumerate(found):
        assert rank_clips == clips[rank * per_rank : (rank + 1) * per_rank]
        for parameter, value in wanted.items():
            gap = (rank_found[parameter] - value).abs().max()
            assert gap <= 1e-8 * value.abs().max().clamp(min=1e-12), parameter


def test_a_clip_that_fails_after_the_reward_adds_nothing(make):
    """The old policy's velocity of a noised state may be not finite although the clip is."""
    trainer = make(**GROUPS, **ALGORITHMS["nft"], train_clips=2)
    batch = trainer.roll_out()
    velocity = trainer.backbone.velocity

    def broken(x, *rest):
        result = velocity(x, *rest)
        result[0] = torch.nan
        return result

    trainer.backbone.velocity = broken
    batch, trained = trainer.select(batch, known_advantages(trainer))
    trainer.backbone.velocity = velocity
    assert [trajectory.is_finite.tolist() for trajectory in batch] == [[False, True]] * 2
    shares = trainer.advantages_by_trajectory(batch, trained)
    assert [share.tolist()[0] for share in shares] == [0.0, 0.0]
    assert all(share[1] != 0 for share in shares)


@pytest.mark.parametrize("lengths", [(1, 2, 1, 2), (1, 1, 2, 2), (2, 1, 1, 1)])
def test_joining_prompts_keeps_the_order_of_clips_that_were_joined_before(lengths):
    """`advantages` are in the order of the rollout's joined micro-batches; the selected clips are joined again."""

    class Text:
        def __init__(self, length):
            self.shapes = (torch.Size([length]),)

    conditions = dict(enumerate(map(Text, lengths)))
    sampled = [ClipId(prompt, sample) for prompt in conditions for sample in range(4)]
    joined = join_micro_batches(split_clips(sampled, 2), conditions, 3)
    order = [clip for micro_batch in joined for clip in micro_batch]
    chosen = [clip for clip in order if clip.sample in (0, 3)]
    again = join_micro_batches(split_clips(chosen, 2), conditions, 3)
    assert [clip for micro_batch in again for clip in micro_batch] == chosen
