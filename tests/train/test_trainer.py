"""The training loop: it runs in every combination, updates what it should, and reports correct numbers."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from sage_grpo.algo.sde import SDES
from sage_grpo.models.backbone import Guidance
from sage_grpo.parallel.fsdp import copy_into
from sage_grpo.rewards.base import Scores
from sage_grpo.train import checkpoint_folders
from sage_grpo.train.guards import TrainingError
from sage_grpo.train.metrics import reward_record
from sage_grpo.train.update import Objective

STRATEGIES = {
    "none": {"kl_weight": 0},
    "fixed": {"use_moving_KL": False, "use_dual_kl": False},
    "stepwise": {"dual_kl_moving_weight": 0},
    "moving": {"use_dual_kl": False},
    "dual_moving": {},
    "dual_fixed": {"use_moving_KL": False},
}


def records(trainer, kind="train"):
    lines = (trainer.run.path / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def snapshot(trainer):
    return {name: p.detach().clone() for name, p in trainer.optimization.parameters.items()}


# each SDE with each strategy, and both of them with LoRA and without
CASES = [
    (sde_type, strategy, (i + j) % 2 == 0)
    for i, sde_type in enumerate(name for name in SDES if name != "ode")
    for j, strategy in enumerate(STRATEGIES)
]


def test_advantages_of_each_score_by_itself(make):
    """VQ 100 times as large as TA: the sum follows VQ, the advantages of each score follow both."""
    trainer = make(advantage_per_score=True, reward_weights='{"VQ": 1.0, "MQ": 0.0, "TA": 3.0}')
    batch = trainer.roll_out()
    found = trainer.score(batch, trainer.decode(batch))
    assert found.weights == {"VQ": 1.0, "MQ": 0.0, "TA": 3.0}
    named = {"VQ": [100.0, 0.0, 0.0, 100.0], "MQ": [math.nan] * 4, "TA": [0.0, 1.0, 0.0, 1.0]}
    named = {name: torch.tensor(values, dtype=torch.float64) for name, values in named.items()}
    scores = Scores(named["VQ"] + 3 * named["TA"], named, weights=found.weights)
    assert trainer.advantages(scores).values.tolist() == pytest.approx([-0.5, 0.5, -1, 1], rel=1e-4)
    plain = make(overwrite=True).advantages(scores).values.tolist()
    assert plain == pytest.approx([1, -1, -1, 1], rel=1e-4)


@pytest.mark.parametrize("sde_type, strategy, use_lora", CASES)
def test_two_iterations(make, sde_type, strategy, use_lora):
    trainer = make(
        sde_type=sde_type, use_lora=use_lora, updates_per_rollout=2, **STRATEGIES[strategy]
    )
    trainer.validation = None
    before = snapshot(trainer)
    trainer.train()
    after = snapshot(trainer)
    first, second = records(trainer)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(value.isfinite().all() for value in after.values())
    assert second["updates"] == 4 and second["policy/skipped_updates"] == 0
    assert first["per_step"]["count"][:2] == [4, 4]  # four clips trained these steps
    anchored = strategy not in ("none", "stepwise")
    assert (second["kl/anchor"] > 0) == anchored
    assert second["kl/rollout"] > 0  # the second half of each rollout is off-policy
    assert (trainer.anchor is not None) == anchored


def test_the_anchor_starts_as_the_policy_follows_or_stays(make):
    for moving, equal in ((True, True), (False, False)):
        trainer = make(use_lora=True, use_moving_KL=moving, update_ref_model_step=2, overwrite=True)
        trainer.train()  # two updates: a refresh is due at the end
        policy, anchor = trainer.optimization.parameters, trainer.anchor.values
        assert all(torch.equal(policy[name], anchor[name]) for name in policy) == equal
        assert (trainer.anchor.age == 0) == equal


def test_the_anchor_forward_is_skipped_only_while_it_would_change_nothing(make):
    trainer = make(use_lora=False)
    batch = trainer.roll_out()
    trainer.prepare_anchor(batch)
    assert batch[0].anchor_velocity is None
    trainer.anchor.age += 1  # as after an update that changed nothing
    trainer.prepare_anchor(batch)
    rows = torch.arange(2)
    for steps in batch[0].trained_positions.T:  # the same forward, so the same bits
        assert torch.equal(
            batch[0].anchor_velocity[rows, steps], batch[0].data.velocity[rows, steps]
        )


@pytest.mark.parametrize("use_lora", [False, True])
def test_the_anchor_takes_the_policys_place_and_gives_it_back(make, use_lora):
    """Its velocities are those of the weights that it copied, whatever the policy has become since."""
    trainer = make(use_lora=use_lora)
    x, cond = torch.randn(1, *trainer.shape), trainer.guidance.negative

    def velocity():
        with torch.no_grad():
            return trainer.backbone.velocity(x, 0.5, cond, Guidance())

    before = velocity()
    with torch.no_grad():
        for parameter in trainer.optimization.parameters.values():
            parameter.add_(0.05)
    after, kept = velocity(), snapshot(trainer)
    with trainer.anchor.active():
        assert torch.equal(velocity(), before)
    assert torch.equal(velocity(), after) and not torch.allclose(after, before)
    assert all(torch.equal(p, kept[name]) for name, p in trainer.optimization.parameters.items())
    copy_into(trainer.anchor.values, trainer.anchor.parameters)
    with trainer.anchor.active():
        assert torch.equal(velocity(), after)


def test_more_updates_per_rollout_make_the_clip_act(make):
    fractions = {}
    for updates in (1, 3):
        trainer = make(
            updates_per_rollout=updates, overwrite=True, sde_window="all", learning_rate=1e-2
        )
        trainer.train()
        fractions[updates] = records(trainer)[-1]["policy/clip_fraction"]
        assert records(trainer)[-1]["updates"] == 2 * updates
    assert fractions[1] == 0 and fractions[3] > 0.2


def test_the_first_ratio_is_one_to_the_last_bit(make):
    normed = {"ratio_norm": True, "sde_type": "precise"}
    for changes in (
        {"enable_gradient_checkpointing": True},
        {"guidance_scale": 3.0},
        {"use_lora": True},
        normed,
    ):
        trainer = make(max_steps=1, overwrite=True, **changes)
        trainer.train()
        assert records(trainer)[0]["policy/ratio_max_deviation"] == 0
        assert records(trainer)[0]["policy/ratio_mean"] == 1


def test_a_forward_that_differs_in_training_stops_the_run(make, monkeypatch):
    trainer = make()
    velocity = trainer.backbone.velocity
    monkeypatch.setattr(
        trainer.backbone,
        "velocity",
        lambda *a: velocity(*a) * (1 + 1e-6 * torch.is_grad_enabled()),
        raising=True,
    )
    with pytest.raises(TrainingError, match=r"first ratio differs from 1 by .*e-"):
        trainer.train()


@pytest.mark.parametrize("permute", [True, False])
@pytest.mark.parametrize("fraction, trained", [(1.0, 6), (0.5, 3)])
def test_the_right_steps_are_trained_with_the_right_normalization(
    make, monkeypatch, permute, fraction, trained
):
    seen = []
    backward = Objective.backward

    def spy(self, trajectory, steps, advantages, stats):
        seen.append((trajectory.micro_batch, steps, self.num_pairs))
        backward(self, trajectory, steps, advantages, stats)

    monkeypatch.setattr(Objective, "backward", spy)
    trainer = make(
        num_sampling_steps=6,
        timestep_fraction=fraction,
        enable_timestep_permutation=permute,
        max_steps=1,
    )
    trainer.train()
    assert {pairs for _, _, pairs in seen} == {4 * trained}
    for one in {one for one, _, _ in seen}:
        steps = torch.stack(
            [steps for other, steps, _ in seen if other == one], 1
        )  # (clips, trained)
        assert steps.shape == (2, trained)
        assert all(len(set(row.tolist())) == trained for row in steps)
        if permute:
            assert not torch.equal(steps[0], steps[1])
        else:
            assert steps.tolist() == [list(range(trained))] * 2


def test_steps_outside_the_window_are_not_trained(make):
    trainer = make(num_sampling_steps=5, sde_window="slide_iteration:2:1", max_steps=2)
    trainer.train()
    counts = [record["per_step"]["count"] for record in records(trainer)]
    assert counts == [[4, 4, 0, 0, 0], [0, 4, 4, 0, 0]]
    assert records(trainer)[0]["per_step"]["grad_v"][2] is None


def test_accumulation_equals_a_bigger_batch(make):
    """The gradient of two accumulated rollouts is that of one batch of both."""
    trainer = make(gradient_accumulation_steps=2)
    parts = []
    for step in (0, 1):
        trainer.state.step = step
        batch = trainer.roll_out()
        advantages = trainer.advantages(trainer.score(batch, trainer.decode(batch)))
        parts.append((batch, advantages))
        if step == 0:
            trainer.update(batch, advantages)
    kept = {}
    trainer.optimization.step = lambda: kept.update(
        {name: p.grad.clone() for name, p in trainer.optimization.parameters.items()}
    )
    trainer.optimization.clip = lambda: 1.0
    trainer.update(*parts[1])

    together = make(gradient_accumulation_steps=1, overwrite=True)
    whole = {}
    together.optimization.step = lambda: whole.update(
        {name: p.grad.clone() for name, p in together.optimization.parameters.items()}
    )
    together.optimization.clip = lambda: 1.0
    joined = type(parts[0][1])(
        torch.cat([part[1].values for part in parts]),
        torch.cat([part[1].trained for part in parts]),
        0,
        0,
        0,
    )
    together.update([t for batch, _ in parts for t in batch], joined)
    assert kept.keys() == whole.keys()
    assert any(value.abs().max() > 0 for value in whole.values())
    for name, value in whole.items():
        torch.testing.assert_close(kept[name], value, rtol=1e-4, atol=1e-9)


def test_gradients_are_zero_only_where_nothing_depends_on_the_parameter(make):
    trainer = make(guidance_scale=2.0)
    batch = trainer.roll_out()
    found = {}
    trainer.optimization.step = lambda: found.update(
        {name: p.grad.abs().max().item() for name, p in trainer.optimization.parameters.items()}
    )
    trainer.update(batch, trainer.advantages(trainer.score(batch, trainer.decode(batch))))
    silent = {name for name, value in found.items() if value == 0}
    assert set(found) == set(trainer.optimization.parameters)
    # the prompts quote no text, so the glyph encoder's tokens are absent
    assert all(name.startswith(("context_embedder_2", "cond_type_embed")) for name in silent), (
        sorted(n for n in silent if not n.startswith(("context_embedder_2", "cond_type")))
    )


def test_the_loss_falls_on_what_it_was_computed_from(make):
    """A small step down the gradient lowers the objective of the same rollout: the sign is right."""
    trainer = make(kl_weight=0, use_grad_balancing=True)
    schedule = trainer.schedule
    batch = trainer.roll_out()
    advantages = trainer.advantages(trainer.score(batch, trainer.decode(batch)))

    def value():
        goal = Objective(
            backbone=trainer.backbone,
            algorithm=trainer.algorithm,
            guidance=trainer.guidance,
            schedule=schedule,
            kl_lambda=0.0,
            num_pairs=1,
        )
        rows = advantages.values.float().split([len(t.data.x) for t in batch])
        with torch.no_grad():
            return sum(
                goal.terms(t.pairs(torch.full((2,), step), schedule.sigmas), a)
                .policy_loss.sum()
                .item()
                for t, a in zip(batch, rows, strict=True)
                for step in range(3)
            )

    before = value()
    for group in trainer.optimization.optimizers[0].param_groups:
        group["weight_decay"] = 0.0
    trainer.optimization.config = trainer.config.__class__(
        **{**trainer.config.__dict__, "learning_rate": 1e-5, "weight_decay": 0.0}
    )
    trainer.update(batch, advantages)
    assert value() < before


def test_average_is_validated_and_exported_but_not_trained(make, monkeypatch):
    trainer = make(ema_decay=0.9, max_steps=1)
    start, validated, run = snapshot(trainer), {}, trainer.validation.run

    def watched_run(*args, **kwargs):
        validated.update(snapshot(trainer))
        return run(*args, **kwargs)

    monkeypatch.setattr(trainer.validation, "run", watched_run)
    trainer.train()
    now = snapshot(trainer)
    name = max(now, key=lambda n: (now[n] - start[n]).abs().max())
    expected = 0.9 * start[name] + 0.1 * now[name]
    torch.testing.assert_close(trainer.optimization.average[name], expected)
    torch.testing.assert_close(validated[name], expected)
    (folder,) = checkpoint_folders.list_checkpoints(trainer.run.path / "checkpoints")
    (file,) = (folder / "transformer").glob("*.safetensors")
    assert torch.equal(load_file(file)[name], trainer.optimization.average[name])
    assert torch.equal(
        load_file(folder / "trainer" / "rank-00000.safetensors")[f"weights/{name}"], now[name]
    )
    assert not torch.allclose(now[name], expected, rtol=1e-6)


def test_muon_takes_the_matrices_of_the_blocks(make):
    trainer = make(optimizer="muon", max_steps=1)
    adamw, muon = trainer.optimization.optimizers
    names = {id(p): name for name, p in trainer.optimization.parameters.items()}
    in_muon = {names[id(p)] for p in muon.param_groups[0]["params"]}
    blocks = trainer.backbone.transformer.block_list
    assert in_muon and all(name.startswith(f"{blocks}.") for name in in_muon)
    assert len(in_muon) + len(adamw.param_groups[0]["params"]) == len(names)
    before = snapshot(trainer)
    trainer.train()
    assert all(
        not torch.equal(before[name], trainer.optimization.parameters[name])
        for name in list(in_muon)[:5]
    )


def test_warmup_raises_the_learning_rate_linearly(make):
    trainer = make(warmup_steps=4, max_steps=3)
    trainer.train()
    assert [record["lr"] for record in records(trainer)] == pytest.approx([2.5e-4, 5e-4, 7.5e-4])


def test_every_metric_of_the_docs_is_written(make):
    trainer = make(max_steps=1, validate_at_step0=True)
    trainer.train()
    (train,), (first, last) = records(trainer), records(trainer, "validation")
    for name in (
        "reward/total",
        "reward/VQ",
        "reward/group_std",
        "policy/grad_norm",
        "kl/coef",
        "time/rollout",
    ):
        assert math.isfinite(train[name]), name
    assert first["step"] == 0 and last["step"] == 1 and first["count"] == 3
    (run,) = records(trainer, "run")
    assert len(run["schedule"]["sigmas"]) == 4
    assert run["trainable_parameters"] == sum(p.numel() for p in snapshot(trainer).values())


def test_lines_come_at_their_interval_and_at_the_end(make):
    trainer = make(max_steps=3, log_interval=2)
    trainer.validation = None
    trainer.train()
    assert [record["step"] for record in records(trainer)] == [2, 3]


def test_the_reward_of_every_iteration_is_kept_and_logging_changes_nothing_else(make):
    runs = {}
    for interval in (1, 3):
        trainer = make(max_steps=4, log_interval=interval, overwrite=True)
        trainer.validation = None
        trainer.train()
        lines = records(trainer, "train") + records(trainer, "reward")
        rewards = [line["reward/total"] for line in sorted(lines, key=lambda line: line["step"])]
        runs[interval] = (rewards, snapshot(trainer))
    assert [line["step"] for line in records(trainer, "train")] == [3, 4]
    short = records(trainer, "reward")
    assert [line["step"] for line in short] == [1, 2]
    assert all(key.startswith("reward/") for key in short[0].keys() - {"kind", "step"})

    (rewards, weights), (other_rewards, other_weights) = runs.values()
    assert rewards == other_rewards
    assert all(torch.equal(value, other_weights[name]) for name, value in weights.items())


def test_spreads_of_the_reward_are_those_of_their_definition(make):
    trainer = make()
    scores = Scores(
        torch.tensor([0.0, 2.0, 10.0, 14.0], dtype=torch.float64), {"VQ": torch.arange(4.0)}
    )
    record = reward_record(scores, trainer.advantages(scores), trainer.config.num_generations)
    assert (
        record["reward/total"] == 6.5
        and record["reward/VQ"] == 1.5
        and record["reward/failed"] == 0
    )
    assert record["reward/std"] == pytest.approx(math.sqrt((6.5**2 + 4.5**2 + 3.5**2 + 7.5**2) / 4))
    assert record["reward/group_std"] == pytest.approx((1 + 2) / 2)
    scores.total[1] = math.nan
    record = reward_record(scores, trainer.advantages(scores), trainer.config.num_generations)
    assert (
        record["reward/total"] == 8
        and record["reward/failed"] == 1
        and record["reward/starved_groups"] == 1
    )
    assert record["reward/group_std"] == pytest.approx((0 + 2) / 2)


@pytest.mark.parametrize(
    "strategy, metric", [("dual_moving", "kl/anchor"), ("stepwise", "kl/rollout")]
)
def test_the_controller_hears_of_the_kl_that_its_strategy_limits(
    make, monkeypatch, strategy, metric
):
    trainer, heard = make(updates_per_rollout=2, **STRATEGIES[strategy]), []
    trainer.validation = None
    update = trainer.controller.update
    monkeypatch.setattr(trainer.controller, "update", lambda kl: heard.append(kl) or update(kl))
    trainer.train()
    first, second = heard[2:]  # of the second iteration: two denoising steps, then one
    record = records(trainer)[-1]
    assert (2 * first + second) / 3 == pytest.approx(record[metric]) and record[
        "kl/anchor"
    ] != record["kl/rollout"]


def test_training_is_reproducible_and_depends_on_the_seed(make):
    results = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        trainer = make(seed=seed, overwrite=True)
        trainer.train()
        results[name] = snapshot(trainer)
    key = next(iter(results["a"]))
    assert all(torch.equal(results["a"][n], results["b"][n]) for n in results["a"])
    assert not torch.equal(results["a"][key], results["c"][key])


def test_recomputing_blocks_changes_no_number(make):
    results = []
    for fraction in (0.0, 0.5, 1.0):
        trainer = make(
            overwrite=True, enable_gradient_checkpointing=True, checkpointing_fraction=fraction
        )
        assert trainer.backbone.transformer.num_recomputed == 2 * fraction
        trainer.train()
        results.append(snapshot(trainer))
    assert all(
        torch.equal(results[0][name], other[name]) for other in results[1:] for name in results[0]
    )
