"""Loss and gradients against a from-scratch implementation of the printed formulas, before any optimizer."""

import itertools
import math

import pytest
import torch

from sage_grpo.algo.equalizer import equalizer
from sage_grpo.models.backbone import Guidance
from sage_grpo.parallel.fsdp import copy_into
from sage_grpo.train.build import start_record
from sage_grpo.train.metrics import UpdateStats
from sage_grpo.train.update import Objective

STRATEGIES = {
    "dual_moving": {},
    "fixed": {"use_moving_KL": False, "use_dual_kl": False},
    "logprob": {"step_kl_estimator": "logprob"},
    "none": {"kl_weight": 0},
    "unbalanced": {"use_grad_balancing": False},
    "balanced_kl": {"use_kl_balancing": True},
}


def reference_gradients(trainer, batch, rewards, eta, error=None, velocity=None):
    """GRPO on stored trajectories in plain loops: sage's mean and variance, advantages, equalizer, clip, two KLs.

    `error` names one deliberate mistake, `velocity` replaces the backbone's.
    """
    config = trainer.config
    velocity = velocity or trainer.backbone.velocity
    sigmas = [5 * u / (1 + 4 * u) for u in (1, 2 / 3, 1 / 3, 0)]
    rows = []
    for sigma, following in itertools.pairwise(sigmas):
        delta, top = sigma - following, min(sigma, 0.997)
        variance = eta**2 * (-delta + math.log((1 - following) / (1 - top)))
        rows.append(
            (
                1 - variance / (2 * sigma),
                -delta - variance * (1 - sigma) / (2 * sigma),
                math.sqrt(variance),
            )
        )
    norms = [abs(b) / std for _, b, std in rows]
    median = sorted(norms)[1]
    total, count, first = 0.0, 0, 0
    for trajectory in batch:
        group = rewards[first : first + 2]
        first += 2
        for i in range(2):
            advantage = (group[i] - group.mean()) / (group.std(correction=0) + 1e-6)
            for t, (a, b, std) in enumerate(rows):
                x, following = trajectory.data.x[i, t], trajectory.data.outcome[i, t]
                both = trajectory.data.x[:, t], torch.full((2,), sigmas[t])
                v = velocity(*both, trajectory.cond, Guidance())[i]
                with torch.no_grad():
                    old = -(
                        ((following - a * x - b * trajectory.data.velocity[i, t]) ** 2)
                        / (2 * std**2)
                    ).mean()
                new = -(((following - a * x - b * v) ** 2) / (2 * std**2)).mean()
                ratio = (new - old).exp()
                clipped = ratio.clamp(1 - config.clip_range, 1 + config.clip_range)
                loss = torch.maximum(-advantage * ratio, -advantage * clipped)
                scale = (
                    median / norms[t]
                    if config.use_grad_balancing and error != "no equalizer"
                    else 1.0
                )
                anchor = (
                    trajectory.anchor_velocity[i, t]
                    if trajectory.anchor_velocity is not None
                    else v.detach()
                )
                kl = (
                    b**2
                    / (2 * std ** (4 if error == "squared variance" else 2))
                    * ((v - anchor) ** 2).mean()
                )
                step_kl = b**2 / (2 * std**2) * ((v - trajectory.data.velocity[i, t]) ** 2).mean()
                if config.step_kl_estimator == "logprob":
                    step_kl = old - new
                sign = -1 if error == "sign of the KL" else 1
                weight = 0.1 * config.use_dual_kl
                sign *= (median / norms[t]) ** 2 if config.use_kl_balancing else 1
                total = (
                    total
                    + scale * loss
                    + sign * trainer.controller.kl_lambda * (kl + weight * step_kl)
                )
                count += 1
    (total / (count if error != "sum over steps" else count / 3)).backward()
    found = {name: p.grad.clone() for name, p in trainer.optimization.parameters.items()}
    trainer.optimization.zero_grad()
    return found


@pytest.fixture
def prepared(make):
    """A trainer whose policy has left both its rollout and its anchor, one rollout, and its rewards."""

    def prepare(**flags):
        trainer = make(
            kl_schedule="fixed", kl_weight=flags.pop("kl_weight", 0.5), clip_range=1e-3, **flags
        )
        schedule = trainer.schedule
        batch = trainer.prepare_for_training(trainer.roll_out())
        rewards = torch.tensor([0.1, 0.9, -2.0, 0.3], dtype=torch.float64)

        def move(size, seed):
            for index, parameter in enumerate(trainer.optimization.parameters.values()):
                noise = torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(seed + index)
                )
                parameter.data += size * noise

        move(2e-3, 0)
        if trainer.anchor:  # a third policy
            copy_into(trainer.anchor.values, trainer.anchor.parameters)
            trainer.anchor.age += 1
            trainer.prepare_anchor(batch)
        move(2e-3, 1000)
        return trainer, schedule, batch, rewards

    return prepare


def our_gradients(trainer, schedule, batch, rewards):
    found = {}
    trainer.ratio_checked = True  # the policy was moved on purpose
    trainer.optimization.clip = lambda: 1.0
    trainer.optimization.step = lambda: found.update(
        {name: p.grad.clone() for name, p in trainer.optimization.parameters.items()}
    )
    scores = type("Scores", (), {"total": rewards})
    trainer.update(batch, trainer.advantages(scores))
    return found


def worst_difference(ours, reference):
    gap = sum((ours[name] - reference[name]).square().sum() for name in reference)
    return (gap / sum(value.square().sum() for value in reference.values())).sqrt().item()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_equal_the_formulas(prepared, strategy):
    trainer, schedule, batch, rewards = prepared(**STRATEGIES[strategy])
    reference = reference_gradients(trainer, batch, rewards, eta=0.5)
    ours = our_gradients(trainer, schedule, batch, rewards)
    assert worst_difference(ours, reference) < 2e-3  # fp32


@pytest.mark.parametrize(
    "error", ["no equalizer", "squared variance", "sign of the KL", "sum over steps"]
)
def test_the_comparison_sees_a_mistake(prepared, error):
    trainer, schedule, batch, rewards = prepared()
    reference = reference_gradients(trainer, batch, rewards, eta=0.5, error=error)
    assert worst_difference(our_gradients(trainer, schedule, batch, rewards), reference) > 0.05


def test_a_broken_path_leaves_the_others_gradients_alone(make):
    """A clip whose path is not finite adds nothing: not to the policy loss, not to the KL, and no NaN."""
    trainer = make(kl_weight=0.5)
    schedule = trainer.schedule
    batch = trainer.roll_out()
    batch[0].is_finite[1] = False
    batch[0].data.x[1], batch[0].data.velocity[1] = (
        0.0,
        7.0,
    )  # as roll_out leaves it, but with a KL that would show
    rewards = torch.tensor([0.1, math.nan, -2.0, 0.3], dtype=torch.float64)
    found = our_gradients(trainer, schedule, batch, rewards)
    assert all(value.isfinite().all() for value in found.values())
    only = {}
    batch[0].data.velocity[1] = -3.0
    only = our_gradients(trainer, schedule, batch, rewards)
    assert all(torch.equal(found[name], only[name]) for name in found)


def measured(trainer, schedule, trajectory, num_pairs, kl_lambda=0.5):
    """The statistics of the first step of a trajectory's two clips."""
    goal = Objective(
        backbone=trainer.backbone,
        algorithm=trainer.algorithm,
        guidance=trainer.guidance,
        schedule=schedule,
        kl_lambda=kl_lambda,
        num_pairs=num_pairs,
    )
    stats = UpdateStats(3, torch.device("cpu"))
    goal.backward(trajectory, torch.tensor([0, 0]), torch.tensor([0.5, -1.0]), stats)
    trainer.optimization.zero_grad()
    return stats


def test_what_is_measured_is_what_is_minimized_whatever_the_size_of_the_batch(prepared):
    trainer, schedule, batch, _ = prepared()
    stats, among_many = (measured(trainer, schedule, batch[0], pairs) for pairs in (2, 24))
    kl, scale = (
        stats.mean("kl_anchor") + 0.1 * stats.mean("kl_rollout"),
        equalizer(schedule)[0].item(),
    )
    assert (
        kl > 0
        and scale > 1.1
        and stats.mean("objective") == pytest.approx(scale * stats.mean("loss") + 0.5 * kl)
    )
    assert 0 < stats.mean("grad_v") == pytest.approx(among_many.mean("grad_v"))


def test_the_scale_of_the_kl_gradient_is_recorded(make):
    """A KL over n elements of a velocity has a gradient of norm scale * sqrt(2 KL / n)."""
    trainer = make(ratio_norm=True, use_kl_balancing=True, use_grad_balancing=False)
    goal = Objective(
        backbone=trainer.backbone,
        algorithm=trainer.algorithm,
        guidance=trainer.guidance,
        schedule=trainer.schedule,
        kl_lambda=0.5,
        num_pairs=1,
    )
    recorded = start_record(trainer)["schedule"]["kl_gradient_scale"]
    for step in trainer.windows.steps:
        velocity = torch.randn(1, 50, device=trainer.schedule.std.device, requires_grad=True)
        kl = trainer.schedule.kl(step, velocity, torch.zeros_like(velocity))
        (gradient,) = torch.autograd.grad(goal.kl_scale[step] * kl.sum(), velocity)
        expected = recorded[step] * math.sqrt(2 * kl.item() / 50)
        assert gradient.norm().item() == pytest.approx(expected, rel=1e-4)


def test_a_broken_path_is_not_measured(prepared):
    trainer, schedule, batch, _ = prepared()
    whole = measured(trainer, schedule, batch[0], 2)
    batch[0].is_finite[1] = False
    stats = measured(trainer, schedule, batch[0], 2)
    assert stats.sums[0].tolist() == [1, 0, 0]
    assert whole.sums[0].tolist() == [2, 0, 0] and stats.mean("loss") != whole.mean("loss")
