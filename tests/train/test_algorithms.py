"""AWM and NFT in the trainer: gradients as the formulas give them, exact first ratios, resume, the old policy."""

import pytest
import torch

from sage_grpo.models.backbone import Guidance
from sage_grpo.train.build import start_record
from tests.smallest_run import slow
from tests.train.test_update import our_gradients, prepared, worst_difference  # noqa: F401 - a fixture

RIVALS = {"awm": {}, "nft": {"nft_beta": 0.5, "nft_decay_growth": 0.2}}


def reference_gradients(trainer, batch, rewards):
    """The losses in plain loops over clips and trained noise levels."""
    c, total, count = trainer.config, 0.0, 0
    for number, trajectory in enumerate(batch):
        group = rewards[2 * number : 2 * number + 2]
        for i in range(2):
            advantage = ((group[i] - group.mean()) / (group.std(correction=0) + 1e-6)).item()
            for place in trajectory.trained_positions[i].tolist():
                sigma = trainer.schedule.sigmas[trajectory.steps[i, place]]
                x, z_minus_x0, old = (
                    part[i, place]
                    for part in (
                        trajectory.data.x,
                        trajectory.data.outcome,
                        trajectory.data.velocity,
                    )
                )
                v = trainer.backbone.velocity(x[None], sigma.view(1), trajectory.cond, Guidance())[
                    0
                ]
                if c.algorithm == "awm":
                    new_log, old_log = (
                        -((v - z_minus_x0) ** 2).mean(),
                        -((old - z_minus_x0) ** 2).mean(),
                    )
                    ratio = (new_log - old_log).exp()
                    clipped = ratio.clamp(1 - c.clip_range, 1 + c.clip_range)
                    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
                else:
                    r, loss = 0.5 + 0.5 * advantage / c.adv_clip_max, 0.0
                    for weight, sign in ((r, 1), (1 - r, -1)):
                        error = sigma * (old + sign * c.nft_beta * (v - old) - z_minus_x0)
                        loss = loss + weight * (error**2).mean() / error.abs().mean().detach()
                anchor = (
                    trajectory.data.velocity
                    if trajectory.anchor_velocity is None
                    else trajectory.anchor_velocity
                )
                kl = ((v - anchor[i, place]) ** 2).mean() + 0.1 * ((v - old) ** 2).mean()
                total, count = total + loss + trainer.controller.kl_lambda * kl, count + 1
    (total / count).backward()
    found = {name: p.grad.clone() for name, p in trainer.optimization.parameters.items()}
    trainer.optimization.zero_grad()
    return found


@pytest.mark.parametrize("name", RIVALS)
def test_gradients_equal_the_formulas(prepared, name):  # noqa: F811
    trainer, schedule, batch, rewards = prepared(
        algorithm=name, timestep_fraction=0.7, **RIVALS[name]
    )
    reference = reference_gradients(trainer, batch, rewards)
    assert (
        worst_difference(our_gradients(trainer, schedule, batch, rewards), reference) < 2e-3
    )  # fp32


@pytest.mark.parametrize(
    "name, use_lora", [("awm", False), slow("awm", True), slow("nft", False), ("nft", True)]
)
def test_runs_learn_with_an_exact_first_ratio_and_resume_to_the_bit(make, tmp_path, name, use_lora):
    """Slow: each with the other kind of weights."""
    flags = {
        "algorithm": name,
        "use_lora": use_lora,
        "timestep_fraction": 0.7,
        "save_interval": 2,
        **RIVALS[name],
    }
    whole = make(**flags, max_steps=4, output_dir=str(tmp_path / "whole"))
    before = {n: p.detach().clone() for n, p in whole.optimization.parameters.items()}
    whole.train()  # stops if the first ratio is not exactly 1
    assert whole.ratio_checked and any(
        not torch.equal(p, before[n]) for n, p in whole.optimization.parameters.items()
    )
    again = {"output_dir": str(tmp_path / "parts")}
    make(**flags, **again, max_steps=2).train()
    rest = make(**flags, **again, max_steps=4, resume_from_checkpoint="auto")
    assert rest.step == 2
    rest.train()
    for n, p in whole.optimization.parameters.items():
        assert torch.equal(p, rest.optimization.parameters[n]), n


def test_clips_are_those_of_the_ode_and_states_lie_on_the_way_to_noise(make):
    trainer = make(algorithm="awm", guidance_scale=2.0)
    (batch, *_) = trainer.prepare_for_training(trainer.roll_out())
    explored = make(
        sde_window="random:1", same_init_noise=False, guidance_scale=2.0, overwrite=True
    )
    assert not torch.equal(explored.roll_out()[0].data.latents, batch.data.latents)
    sigma = trainer.schedule.sigmas[batch.steps].view(*batch.steps.shape, 1, 1, 1, 1)
    torch.testing.assert_close(
        batch.data.x, batch.data.latents[:, None] + sigma * batch.data.outcome, rtol=1e-5, atol=1e-5
    )
    assert not any(start_record(trainer)["schedule"]["std"]) and any(
        start_record(explored)["schedule"]["std"]
    )
    plain = trainer.backbone.velocity(
        batch.data.x[:, 0], trainer.schedule.sigmas[batch.steps[:, 0]], batch.cond, Guidance()
    )
    torch.testing.assert_close(
        batch.data.velocity[:, 0], plain, rtol=1e-4, atol=1e-5
    )  # without guidance


def test_guidance_in_part_of_the_steps_costs_less_and_is_guidance_there(make):
    """Clips are those of a loop that guides the steps inside the interval, and trained without any."""
    flags = {"algorithm": "nft", "guidance_scale": 3.0, "num_sampling_steps": 4, "overwrite": True}
    trainer = make(**flags, guidance_interval="0.3:0.9")
    forwards = []
    trainer.backbone.transformer.register_forward_pre_hook(lambda *_: forwards.append(1))
    (batch, *_) = trainer.roll_out()
    sigmas = trainer.schedule.sigmas
    guided = [0.3 <= sigma <= 0.9 for sigma in sigmas[:-1].tolist()]
    assert 0 < sum(guided) < 4
    assert len(forwards) == 2 * (4 + sum(guided))  # two prompts

    x, _ = trainer.rollout_sampler([batch.micro_batch]).noise(batch.micro_batch)
    with torch.no_grad():
        for i, is_guided in enumerate(guided):
            guidance = Guidance(3.0, trainer.guidance.negative) if is_guided else Guidance()
            velocity = trainer.backbone.velocity(x, sigmas[i].expand(2), batch.cond, guidance)
            x = x - (sigmas[i] - sigmas[i + 1]) * velocity
    torch.testing.assert_close(batch.data.latents, x, rtol=1e-5, atol=1e-5)
    whole = make(**flags).roll_out()[0].data.latents
    assert not torch.allclose(whole, x, atol=1e-3)
    assert trainer.trained_guidance == Guidance()
    assert trainer.validation.guidance.interval == (0.0, 1.0)


@pytest.mark.parametrize("solver", ["dpm3", "unipc"])
def test_clips_may_be_sampled_by_any_solver(make, solver):
    flags = {"algorithm": "awm", "num_sampling_steps": 8, "tail_steps": 6, "overwrite": True}
    latents = make(**flags, tail_solver=solver).roll_out()[0].data.latents
    second_order = make(**flags).roll_out()[0].data.latents
    assert not torch.equal(latents, second_order)
    torch.testing.assert_close(latents, second_order, rtol=0.1, atol=0.1)


def test_only_the_levels_that_are_trained_are_kept(make):
    flags = {
        "algorithm": "awm",
        "sde_window": "all",
        "num_sampling_steps": 4,
        "enable_timestep_permutation": True,
    }
    trainers = [make(**flags, timestep_fraction=share, overwrite=True) for share in (1.0, 0.5)]
    whole, half = (trainer.prepare_for_training(trainer.roll_out())[0] for trainer in trainers)
    assert (
        half.trained_positions.tolist() == [[0, 1]] * len(half.trained_positions)
        and len(set(map(tuple, whole.steps.tolist()))) > 1
    )
    assert torch.equal(
        half.steps, whole.steps[:, :2]
    )  # in the order of training, another one for each clip
    for part in ("x", "outcome", "velocity", "log_prob"):
        assert torch.equal(getattr(half.data, part), getattr(whole.data, part)[:, :2]), part


def test_an_anchor_that_equals_the_policy_is_not_the_old_policy(make):
    for name, measured in (("nft", True), ("awm", False)):
        trainer = make(algorithm=name, kl_weight=0.1, overwrite=True)
        batch = trainer.prepare_for_training(trainer.roll_out())
        assert trainer.anchor.age == 0
        trainer.prepare_anchor(batch)
        assert all((trajectory.anchor_velocity is not None) == measured for trajectory in batch)


def test_nft_samples_with_its_old_policy(make):
    trainer = make(algorithm="nft")
    before = trainer.roll_out()[0].data.latents
    for parameter in trainer.optimization.parameters.values():
        parameter.data += 0.05
    assert torch.equal(trainer.roll_out()[0].data.latents, before)
    trainer.optimization.old_policy = {}  # as if the trained policy sampled
    assert not torch.equal(trainer.roll_out()[0].data.latents, before)
